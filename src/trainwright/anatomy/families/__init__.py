"""The families that are known, by the `model_type` of their config.json; modules are imported when needed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from trainwright.anatomy.families.blocks import Records
from trainwright.anatomy.family import Family

FAMILIES: Final[Mapping[str, str]] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "gemma": "llama",
    "gemma2": "llama",
    "gemma3_text": "llama",
    "gemma3": "gemma3",
    "phi3": "llama",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "smollm3": "smollm3",
    "granite": "granite",
    "glm": "glm",
    "glm4": "glm",
    "ministral": "ministral",
    "ministral3": "ministral",
    "seed_oss": "seed_oss",
    "hunyuan_v1_dense": "hunyuan",
    "exaone4": "exaone4",
    "ernie4_5": "ernie",
    "phi": "gpt",
    "gpt2": "gpt",
    "gpt_neox": "gpt",
    "gpt_bigcode": "gpt",
    "starcoder2": "gpt",
    "mpt": "early",
    "opt": "early",
    "bloom": "early",
    "mixtral": "experts",
    "qwen2_moe": "experts",
    "qwen3_moe": "experts",
    "t5": "t5",
    "bert": "encoders",
    "vit": "encoders",
}
"""The module that describes each."""


def family(model_type: str) -> Family:
    """The record of a family."""
    records: Records = import_module(f"{__name__}.{FAMILIES[model_type]}").RECORDS
    return records[model_type]

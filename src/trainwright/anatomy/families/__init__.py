"""The families whose anatomy is known, by the `model_type` of their config.json; modules are imported when needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from trainwright.anatomy.config import Config
from trainwright.anatomy.families.blocks import Builders
from trainwright.anatomy.parts import Anatomy

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


def family(model_type: str) -> tuple[type[Config], Callable[[Any], Anatomy]]:
    """The config of a family, and what builds the anatomy from it."""
    builders: Builders = import_module(f"{__name__}.{FAMILIES[model_type]}").BUILDERS
    return builders[model_type]

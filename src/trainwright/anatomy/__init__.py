"""What a model is made of, from its config alone: parameters, adapters, FLOPs; without torch, weights or network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.anatomy.config import Config, read_fields, unknown_family
from trainwright.anatomy.families import FAMILIES, family
from trainwright.anatomy.parts import Anatomy

__all__ = ["Anatomy", "anatomy", "read_config"]


def read_config(raw: Mapping[str, Any], *, from_scratch: bool = False) -> Config:
    """The dimensions in the content of a config.json; `from_scratch` when no checkpoint is loaded (T5 differs).

    Raises:
        UserError: a family or feature that is not described here, or impossible values, all at once.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise unknown_family(model_type, tuple(FAMILIES))
    return read_fields(family(model_type).config, {**raw, "from_scratch": from_scratch})


def anatomy(config: Config) -> Anatomy:
    """The model that transformers builds from these dimensions: for causal LM, seq2seq, masked LM or images."""
    record = family(config.model_type)
    return record.build(record, config)

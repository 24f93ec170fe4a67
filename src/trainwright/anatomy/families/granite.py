"""Granite 3 and 4 (dense): Llama with numbers that scale embeddings, residual sums and logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainwright.anatomy.families.blocks import by_name
from trainwright.anatomy.families.llama import LLAMA, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """`configuration_granite.py`; the numbers have no influence on memory, but that they are there has."""

    model_type = "granite"


RECORDS: Final = by_name(
    replace(LLAMA, config=GraniteConfig, embedding="scaled_behind", scaled_residuals=True, scaled_logits=True)
)

"""Ministral: Mistral with windows layer by layer (8B), and with queries scaled by their position (3, text)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainwright.anatomy.config import derived
from trainwright.anatomy.families.blocks import by_name
from trainwright.anatomy.families.llama import MISTRAL, MistralConfig
from trainwright.anatomy.families.llama_line import one_type_a_layer


@dataclass(frozen=True, kw_only=True)
class MinistralConfig(MistralConfig):
    """`configuration_ministral.py`."""

    model_type = "ministral"
    layer_types: tuple[str, ...] = derived(
        lambda config: (
            ("full_attention" if config.sliding_window is None else "sliding_attention",) * config.num_hidden_layers
        )
    )

    def problems(self) -> list[str]:
        """One type of attention for each layer."""
        return one_type_a_layer(self.layer_types, self.num_hidden_layers)


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(MistralConfig):
    """`configuration_ministral3.py`."""

    model_type = "ministral3"
    vocab_size: int = 131072
    num_hidden_layers: int = 34
    head_dim: int = 128
    sliding_window: int | None = None


RECORDS: Final = by_name(
    replace(MISTRAL, config=MinistralConfig, makes_both_masks=True),
    replace(MISTRAL, config=Ministral3Config, scaled_queries=True),
)

"""OLMo 2 and 3: norms behind attention and MLP, and of all heads of queries and keys together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainwright.anatomy.config import derived
from trainwright.anatomy.families.blocks import by_name
from trainwright.anatomy.families.llama import LLAMA, LlamaConfig
from trainwright.anatomy.families.llama_line import alternating, one_type_a_layer
from trainwright.anatomy.family import HeadNorms, LayerNorms


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(LlamaConfig):
    """`configuration_olmo2.py`."""

    model_type = "olmo2"
    vocab_size: int = 50304


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config):
    """`configuration_olmo3.py`; one layer in four sees all."""

    model_type = "olmo3"
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] = derived(lambda config: alternating(config.num_hidden_layers, 4))

    def problems(self) -> list[str]:
        """Hidden size and heads must agree; one type of attention for each layer."""
        return [*super().problems(), *one_type_a_layer(self.layer_types, self.num_hidden_layers)]


OLMO2 = replace(
    LLAMA,
    config=Olmo2Config,
    norm="rms_scaled_in_fp32",
    norms=LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    head_norms=HeadNorms(of_all_heads=True),
    rotation="halves_in_fp32",
    mlp_bias=False,
)
OLMO3 = replace(OLMO2, config=Olmo3Config, makes_both_masks=True, tables_of_each_layer_type=True)

RECORDS: Final = by_name(OLMO2, OLMO3)

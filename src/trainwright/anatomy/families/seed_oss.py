"""Seed-OSS: Llama with biases of queries, keys and values, and with dropouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainwright.anatomy.config import derived
from trainwright.anatomy.families.blocks import by_name
from trainwright.anatomy.families.llama import LLAMA, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
    """`configuration_seed_oss.py`."""

    model_type = "seed_oss"
    vocab_size: int = 155136
    intermediate_size: int = 27648
    num_hidden_layers: int = 64
    num_attention_heads: int = 80
    num_key_value_heads: int = derived(lambda config: config.num_attention_heads, default=8)
    head_dim: int = 128
    attention_bias: bool = True
    attention_out_bias: bool = False
    residual_dropout: float = 0.1

    @property
    def resid_pdrop(self) -> float:
        """Under the name that others have for it."""
        return self.residual_dropout

    def problems(self) -> list[str]:
        """Heads need not add up to the hidden size."""
        return []


RECORDS: Final = by_name(replace(LLAMA, config=SeedOssConfig, output_bias="attention_out_bias", drops_attention=True))

"""ERNIE 4.5 (dense): Llama that turns pairs of neighbours, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainwright.anatomy.config import Config, derived
from trainwright.anatomy.families.blocks import by_name
from trainwright.anatomy.families.llama_line import llama_line
from trainwright.anatomy.family import Family


@dataclass(frozen=True, kw_only=True)
class Ernie45Config(Config):
    """`configuration_ernie4_5.py`."""

    model_type = "ernie4_5"
    vocab_size: int = 103424
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int = 16
    num_key_value_heads: int = derived(lambda config: config.num_attention_heads, default=2)
    head_dim: int = 128
    use_bias: bool = False
    tie_word_embeddings: bool = True


RECORDS: Final = by_name(
    Family(
        config=Ernie45Config,
        build=llama_line,
        rotation="pairs_in_fp32",
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
    )
)

"""GLM-4: half of each head is turned, by pairs; gate and up are one matrix; GLM-4-0414 has norms on both sides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainwright.anatomy.config import Config
from trainwright.anatomy.families.blocks import by_name
from trainwright.anatomy.families.llama_line import llama_line
from trainwright.anatomy.family import Family, LayerNorms


@dataclass(frozen=True, kw_only=True)
class GlmConfig(Config):
    """`configuration_glm.py` (GLM-4-9B of 2024, GLM-Edge)."""

    model_type = "glm"
    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_attention_heads: int = 32
    num_key_value_heads: int = 2
    head_dim: int = 128
    attention_bias: bool = True
    tie_word_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class Glm4Config(GlmConfig):
    """`configuration_glm4.py` (GLM-4-0414)."""

    model_type = "glm4"


GLM = Family(
    config=GlmConfig,
    build=llama_line,
    rotation="pairs_and_rest",
    rotary_share=0.5,
    qkv_bias="attention_bias",
    joined_mlp=True,
)
GLM4 = replace(
    GLM,
    config=Glm4Config,
    norms=LayerNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)

RECORDS: Final = by_name(GLM, GLM4)

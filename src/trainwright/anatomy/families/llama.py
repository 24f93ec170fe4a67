"""Decoders of the Llama line: Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3 (text), Phi-3."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainwright.anatomy.config import Config, derived, multiple_of_heads
from trainwright.anatomy.families.blocks import by_name
from trainwright.anatomy.families.llama_line import alternating, llama_line, one_type_a_layer, split_evenly
from trainwright.anatomy.family import Family, HeadNorms, LayerNorms


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Config):
    """`configuration_llama.py`."""

    model_type = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = derived(lambda config: config.num_attention_heads)
    head_dim: int = derived(split_evenly)
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    def problems(self) -> list[str]:
        """Hidden size and heads must agree."""
        return multiple_of_heads(self.hidden_size, self.num_attention_heads)


@dataclass(frozen=True, kw_only=True)
class MistralConfig(Config):
    """`configuration_mistral.py`."""

    model_type = "mistral"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = derived(split_evenly)
    sliding_window: int | None = 4096
    tie_word_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(Config):
    """`configuration_qwen2.py`; queries, keys and values always have a bias."""

    model_type = "qwen2"
    may_be_zero = frozenset({"max_window_layers"})
    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = derived(lambda config: config.num_attention_heads, default=32)
    head_dim: int = derived(split_evenly)
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] = derived(
        lambda config: tuple(
            "sliding_attention" if config.use_sliding_window and i >= config.max_window_layers else "full_attention"
            for i in range(config.num_hidden_layers)
        )
    )
    tie_word_embeddings: bool = False

    def problems(self) -> list[str]:
        """One type of attention for each layer."""
        return one_type_a_layer(self.layer_types, self.num_hidden_layers)


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """`configuration_qwen3.py`; queries and keys are normalised instead."""

    model_type = "qwen3"
    head_dim: int = 128
    attention_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(Config):
    """`configuration_gemma.py`."""

    model_type = "gemma"
    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 256
    attention_bias: bool = False
    use_bidirectional_attention: bool | None = None
    tie_word_embeddings: bool = True


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    """`configuration_gemma2.py`; every other layer looks back over a window only."""

    model_type = "gemma2"
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] = derived(lambda config: alternating(config.num_hidden_layers, 2))

    def problems(self) -> list[str]:
        """Hidden size and heads must agree; one type of attention for each layer."""
        return [
            *multiple_of_heads(self.hidden_size, self.num_attention_heads),
            *one_type_a_layer(self.layer_types, self.num_hidden_layers),
        ]


@dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(Gemma2Config):
    """`Gemma3TextConfig` of `configuration_gemma3.py`; one layer in six sees all."""

    model_type = "gemma3_text"
    vocab_size: int = 262_208
    sliding_window_pattern: int = 6
    layer_types: tuple[str, ...] = derived(
        lambda config: alternating(config.num_hidden_layers, config.sliding_window_pattern)
    )


@dataclass(frozen=True, kw_only=True)
class Phi3Config(Config):
    """`configuration_phi3.py` (Phi-3, Phi-3.5, Phi-4)."""

    model_type = "phi3"
    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = derived(lambda config: config.num_attention_heads)
    head_dim: int = derived(split_evenly)
    resid_pdrop: float = 0.0
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    tie_word_embeddings: bool = False


LLAMA = Family(
    config=LlamaConfig,
    build=llama_line,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
)
MISTRAL = Family(config=MistralConfig, build=llama_line)
QWEN2 = Family(config=Qwen2Config, build=llama_line, qkv_bias=True)
QWEN3 = Family(
    config=Qwen3Config,
    build=llama_line,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    head_norms=HeadNorms(),
)
GEMMA = Family(
    config=GemmaConfig,
    build=llama_line,
    norm="rms_of_one_more",
    embedding="scaled",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
)
GEMMA2 = replace(
    GEMMA,
    config=Gemma2Config,
    norms=LayerNorms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    attention_is_eager=True,
    softcapped=True,
    makes_both_masks=True,
)
GEMMA3_TEXT = replace(
    GEMMA2,
    config=Gemma3TextConfig,
    head_norms=HeadNorms(),
    attention_is_eager=False,
    softcapped=False,
    tables_of_each_layer_type=True,
)
PHI3 = Family(config=Phi3Config, build=llama_line, joined_projections=True, joined_mlp=True, rotation="halves_and_rest")

RECORDS: Final = by_name(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3_TEXT, PHI3)

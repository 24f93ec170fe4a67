"""Decoders with layer norms and a plain MLP: GPT-2, GPT-BigCode, StarCoder2, Phi-1 and 2, GPT-NeoX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from trainwright.anatomy.config import Config, derived, multiple_of_heads
from trainwright.anatomy.families.blocks import QKV, by_name, decoder, head_norms, plain_mlp, split_attention, stack
from trainwright.anatomy.families.llama_line import split_evenly
from trainwright.anatomy.family import Family, LayerNorms
from trainwright.anatomy.parts import Anatomy, Attention, Kind, Operation, embedding, linear, norm


@dataclass(frozen=True, kw_only=True)
class Gpt2Config(Config):
    """`configuration_gpt2.py`."""

    model_type = "gpt2"
    aliases: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    refused: ClassVar[Mapping[str, Any]] = {"add_cross_attention": False}
    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    resid_pdrop: float = 0.1
    tie_word_embeddings: bool = True

    def problems(self) -> list[str]:
        """Hidden size and heads must agree."""
        return multiple_of_heads(self.n_embd, self.n_head)


@dataclass(frozen=True, kw_only=True)
class GptBigCodeConfig(Gpt2Config):
    """`configuration_gpt_bigcode.py`; one head of keys and values unless `multi_query` is false."""

    model_type = "gpt_bigcode"
    multi_query: bool = True


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config(Config):
    """`configuration_starcoder2.py`."""

    model_type = "starcoder2"
    vocab_size: int = 49152
    hidden_size: int = 3072
    intermediate_size: int = 12288
    num_hidden_layers: int = 30
    num_attention_heads: int = 24
    num_key_value_heads: int = 2
    head_dim: int = derived(split_evenly)
    sliding_window: int | None = None
    residual_dropout: float = 0.0
    use_bias: bool = True
    tie_word_embeddings: bool = True


@dataclass(frozen=True, kw_only=True)
class PhiConfig(Config):
    """`configuration_phi.py` (Phi-1, Phi-1.5, Phi-2); attention and MLP stand side by side behind one norm."""

    model_type = "phi"
    vocab_size: int = 51200
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = derived(lambda config: config.num_attention_heads)
    head_dim: int = derived(split_evenly)
    resid_pdrop: float = 0.0
    qk_layernorm: bool = False
    tie_word_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class GptNeoxConfig(Config):
    """`configuration_gpt_neox.py`."""

    model_type = "gpt_neox"
    vocab_size: int = 50432
    hidden_size: int = 6144
    intermediate_size: int = 24576
    num_hidden_layers: int = 44
    num_attention_heads: int = 64
    hidden_dropout: float = 0.0
    use_parallel_residual: bool = True
    attention_bias: bool = True
    tie_word_embeddings: bool = False

    def problems(self) -> list[str]:
        """Hidden size and heads must agree."""
        return multiple_of_heads(self.hidden_size, self.num_attention_heads)


def gpt2(family: Family, config: Gpt2Config) -> Anatomy:
    """Layers of `modeling_gpt2.py`, whose linears are stored transposed (`Conv1D`)."""
    return _gpt2(family, config, config.n_head, "conv1d")


def gpt_bigcode(family: Family, config: GptBigCodeConfig) -> Anatomy:
    """Layers of `modeling_gpt_bigcode.py`."""
    return _gpt2(family, config, 1 if config.multi_query else config.n_head, "linear")


def _gpt2(family: Family, config: Gpt2Config, key_value_heads: int, kind: Kind) -> Anatomy:
    hidden, head_dim = config.n_embd, config.n_embd // config.n_head
    inner = config.n_inner or 4 * hidden
    joined = hidden + 2 * key_value_heads * head_dim
    block: tuple[Operation, ...] = (
        norm("ln_1", hidden, bias=True),
        linear("attn.c_attn", "query_key_value", hidden, joined, bias=True, writes=QKV, kind=kind),
        Attention(config.n_head, key_value_heads, head_dim),
        linear("attn.c_proj", "attention_output", hidden, hidden, bias=True, reads="heads", kind=kind),
        norm("ln_2", hidden, bias=True),
        linear("mlp.c_fc", "mlp", hidden, inner, bias=True, writes="inner", kind=kind),
        linear("mlp.c_proj", "mlp", inner, hidden, bias=True, reads="inner", kind=kind),
    )
    return decoder(
        family,
        stack("transformer.h", [block] * config.n_layer, dropout=config.resid_pdrop),
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        tie=config.tie_word_embeddings,
        tokens="transformer.wte",
        final_norm="transformer.ln_f",
        norm_bias=True,
        after_embedding=(embedding("transformer.wpe", config.n_positions, hidden),),
    )


def starcoder2(family: Family, config: Starcoder2Config) -> Anatomy:
    """Layers of `modeling_starcoder2.py`."""
    hidden, bias = config.hidden_size, config.use_bias
    attention = Attention(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        window=config.sliding_window,
        rotary=family.rotary_share,
    )
    block = (
        norm("input_layernorm", hidden, bias=True),
        *split_attention("self_attn", hidden, attention, qkv_bias=bias, out_bias=bias),
        norm("post_attention_layernorm", hidden, bias=True),
        *plain_mlp("mlp.c_fc", "mlp.c_proj", hidden, config.intermediate_size, bias=bias),
    )
    return decoder(
        family,
        stack("model.layers", [block] * config.num_hidden_layers, dropout=config.residual_dropout),
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        tie=config.tie_word_embeddings,
        norm_bias=True,
    )


def phi(family: Family, config: PhiConfig) -> Anatomy:
    """Layers of `modeling_phi.py`."""
    hidden = config.hidden_size
    attention = Attention(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, rotary=family.rotary_share
    )
    head_size = hidden // config.num_attention_heads
    norms = head_norms("self_attn.q_layernorm", "self_attn.k_layernorm", head_size, bias=True)
    block = (
        norm("input_layernorm", hidden, bias=True),
        *split_attention(
            "self_attn",
            hidden,
            attention,
            names=("q_proj", "k_proj", "v_proj", "dense"),
            qkv_bias=True,
            out_bias=True,
            head_norm=norms if config.qk_layernorm else (),
        ),
        *plain_mlp("mlp.fc1", "mlp.fc2", hidden, config.intermediate_size),
    )
    return decoder(
        family,
        stack("model.layers", [block] * config.num_hidden_layers, dropout=config.resid_pdrop),
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        tie=config.tie_word_embeddings,
        final_norm="model.final_layernorm",
        norm_bias=True,
        head_bias=True,
    )


def gpt_neox(family: Family, config: GptNeoxConfig) -> Anatomy:
    """Layers of `modeling_gpt_neox.py`; with `use_parallel_residual` the MLP reads what the attention reads."""
    hidden, inner, heads, bias = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.attention_bias,
    )
    attention = (
        linear("attention.query_key_value", "query_key_value", hidden, 3 * hidden, bias=bias, writes=QKV),
        Attention(heads, heads, hidden // heads, rotary=family.rotary_share),
        linear("attention.dense", "attention_output", hidden, hidden, bias=bias, reads="heads"),
    )
    before_mlp = norm("post_attention_layernorm", hidden, bias=True, writes="normed_for_mlp")
    block: tuple[Operation, ...] = (
        norm("input_layernorm", hidden, bias=True),
        *((before_mlp, *attention) if config.use_parallel_residual else (*attention, before_mlp)),
        *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", hidden, inner, reads="normed_for_mlp"),
    )
    return decoder(
        family,
        stack("gpt_neox.layers", [block] * config.num_hidden_layers, dropout=config.hidden_dropout),
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        tie=config.tie_word_embeddings,
        tokens="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        norm_bias=True,
    )


GPT2 = Family(
    config=Gpt2Config,
    build=gpt2,
    layer="GPT2Block",
    norm="layer",
    norms=LayerNorms("ln_1", None, "ln_2", None),
    norms_registered_first=True,
    positions="table",
    activation="new_gelu",
)
GPT_BIGCODE = replace(
    GPT2,
    config=GptBigCodeConfig,
    build=gpt_bigcode,
    positions="table_behind_masks",
    activation="one_kernel",
    position_mask_buffer=True,
)
STARCODER2 = Family(config=Starcoder2Config, build=starcoder2, layer="Starcoder2DecoderLayer", norm="layer")
PHI = Family(
    config=PhiConfig,
    build=phi,
    layer="PhiDecoderLayer",
    norm="layer",
    norms=LayerNorms("input_layernorm", None, None, None),
    rotation="halves_and_rest",
    rotary_share=0.5,
    activation="new_gelu",
)
GPT_NEOX = Family(
    config=GptNeoxConfig,
    build=gpt_neox,
    layer="GPTNeoXLayer",
    norm="layer",
    norms_registered_first=True,
    rotation="halves_and_rest",
    rotary_share=0.25,
)

RECORDS: Final = by_name(GPT2, GPT_BIGCODE, STARCODER2, PHI, GPT_NEOX)

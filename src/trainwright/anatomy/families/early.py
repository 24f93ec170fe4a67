"""Open decoders of 2022 and 2023 with ways of their own: OPT, BLOOM, MPT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from trainwright.anatomy.config import Config, derived, multiple_of_heads
from trainwright.anatomy.families.blocks import QKV, by_name, decoder, plain_mlp, split_attention, stack
from trainwright.anatomy.family import Family, LayerNorms
from trainwright.anatomy.parts import Anatomy, Attention, Operation, Segment, embedding, linear, norm


@dataclass(frozen=True, kw_only=True)
class OptConfig(Config):
    """`configuration_opt.py`; `word_embed_proj_dim` differs from the hidden size in OPT-350m alone."""

    model_type = "opt"
    refused: ClassVar[Mapping[str, Any]] = {"layer_norm_elementwise_affine": True}
    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    ffn_dim: int = 3072
    max_position_embeddings: int = 2048
    word_embed_proj_dim: int = derived(lambda config: config.hidden_size)
    do_layer_norm_before: bool = True
    _remove_final_layer_norm: bool = False
    enable_bias: bool = True
    dropout: float = 0.1
    tie_word_embeddings: bool = True

    def problems(self) -> list[str]:
        """Hidden size and heads must agree."""
        return multiple_of_heads(self.hidden_size, self.num_attention_heads)


@dataclass(frozen=True, kw_only=True)
class BloomConfig(Config):
    """`configuration_bloom.py`."""

    model_type = "bloom"
    aliases: ClassVar[Mapping[str, str]] = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "n_embed": "hidden_size",
    }
    vocab_size: int = 250880
    hidden_size: int = 64
    n_layer: int = 2
    n_head: int = 8
    hidden_dropout: float = 0.0
    tie_word_embeddings: bool = True

    def problems(self) -> list[str]:
        """Hidden size and heads must agree."""
        return multiple_of_heads(self.hidden_size, self.n_head)


@dataclass(frozen=True, kw_only=True)
class MptConfig(Config):
    """`configuration_mpt.py`; transformers ignores `expansion_ratio` (always 4) and every bias."""

    model_type = "mpt"
    aliases: ClassVar[Mapping[str, str]] = {
        "num_attention_heads": "n_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
    }
    vocab_size: int = 50368
    d_model: int = 2048
    n_heads: int = 16
    n_layers: int = 24
    resid_pdrop: float = 0.0
    tie_word_embeddings: bool = True

    def problems(self) -> list[str]:
        """Hidden size and heads must agree."""
        return multiple_of_heads(self.d_model, self.n_heads)


def opt(family: Family, config: OptConfig) -> Anatomy:
    """Layers of `modeling_opt.py`; OPT-350m normalises after each part instead of before."""
    hidden, heads, width, bias = (
        config.hidden_size,
        config.num_attention_heads,
        config.word_embed_proj_dim,
        config.enable_bias,
    )
    first = config.do_layer_norm_before
    reads, norm_writes = ("normed", "normed") if first else ("tokens", "tokens")
    attention = split_attention(
        "self_attn",
        hidden,
        Attention(heads, heads, hidden // heads),
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
        qkv_bias=bias,
        out_bias=bias,
        reads=reads,
    )
    mlp = plain_mlp("fc1", "fc2", hidden, config.ffn_dim, bias=bias, reads=reads)
    attention_norm = norm("self_attn_layer_norm", hidden, bias=True, writes=norm_writes)
    mlp_norm = norm("final_layer_norm", hidden, bias=True, writes=norm_writes)
    block = (attention_norm, *attention, mlp_norm, *mlp) if first else (*attention, attention_norm, *mlp, mlp_norm)

    path, words = "model.decoder", "model.decoder.embed_tokens"
    stream = "tokens" if width == hidden else "words"
    before: tuple[Operation, ...] = (embedding(words, config.vocab_size, width, writes=stream, begins=True),)
    after: tuple[Operation, ...] = ()
    if first and not config._remove_final_layer_norm:
        after += (norm(f"{path}.final_layer_norm", hidden, bias=True, writes="tokens"),)
    if width != hidden:
        before += (linear(f"{path}.project_in", "embedding", width, hidden, reads=stream),)
        after += (linear(f"{path}.project_out", "head", hidden, width, reads="tokens", writes=stream),)
    before += (embedding(f"{path}.embed_positions", config.max_position_embeddings + 2, hidden),)
    tied_to = words if config.tie_word_embeddings else None
    head = linear("lm_head", "head", width, config.vocab_size, reads=stream, writes="logits", tied_to=tied_to)
    layers = stack(f"{path}.layers", [block] * config.num_hidden_layers, dropout=config.dropout)
    return Anatomy(family, (Segment("", before), *layers, Segment("", (*after, head))), output="lm_head")


def bloom(family: Family, config: BloomConfig) -> Anatomy:
    """Layers of `modeling_bloom.py`."""
    hidden, heads = config.hidden_size, config.n_head
    block: tuple[Operation, ...] = (
        norm("input_layernorm", hidden, bias=True),
        linear("self_attention.query_key_value", "query_key_value", hidden, 3 * hidden, bias=True, writes=QKV),
        Attention(heads, heads, hidden // heads),
        linear("self_attention.dense", "attention_output", hidden, hidden, bias=True, reads="heads"),
        norm("post_attention_layernorm", hidden, bias=True),
        *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", hidden, 4 * hidden),
    )
    return decoder(
        family,
        stack("transformer.h", [block] * config.n_layer, dropout=config.hidden_dropout),
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        tie=config.tie_word_embeddings,
        tokens="transformer.word_embeddings",
        after_embedding=(norm("transformer.word_embeddings_layernorm", hidden, bias=True, writes="tokens"),),
        final_norm="transformer.ln_f",
        norm_bias=True,
    )


def mpt(family: Family, config: MptConfig) -> Anatomy:
    """Layers of `modeling_mpt.py`."""
    hidden, heads = config.d_model, config.n_heads
    block: tuple[Operation, ...] = (
        norm("norm_1", hidden),
        linear("attn.Wqkv", "query_key_value", hidden, 3 * hidden, writes=QKV),
        Attention(heads, heads, hidden // heads),
        linear("attn.out_proj", "attention_output", hidden, hidden, reads="heads"),
        norm("norm_2", hidden),
        *plain_mlp("ffn.up_proj", "ffn.down_proj", hidden, 4 * hidden, bias=False),
    )
    return decoder(
        family,
        stack("transformer.blocks", [block] * config.n_layers, dropout=config.resid_pdrop),
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        tie=config.tie_word_embeddings,
        tokens="transformer.wte",
        final_norm="transformer.norm_f",
    )


OPT = Family(
    config=OptConfig,
    build=opt,
    layer="OPTDecoderLayer",
    norm="layer",
    norms=LayerNorms("self_attn_layer_norm", None, "final_layer_norm", None),
    positions="table_for_each_sample",
)
BLOOM = Family(
    config=BloomConfig,
    build=bloom,
    layer="BloomBlock",
    norm="layer",
    norms_registered_first=True,
    positions="slopes",
    attention_is_eager=True,
    does_without_padding_mask=False,
    activation="bloom_gelu",
    embedding="normed",
)
MPT = Family(
    config=MptConfig,
    build=mpt,
    layer="MptBlock",
    norm="layer",
    norms=LayerNorms("norm_1", None, "norm_2", None),
    norms_registered_first=True,
    positions="slopes",
    attention_is_eager=True,
    mask_of_bools=True,
    does_without_padding_mask=False,
)

RECORDS: Final = by_name(OPT, BLOOM, MPT)

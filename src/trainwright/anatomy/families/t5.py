"""T5, T5 1.1 and Flan-T5: an encoder and a decoder that attends to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from trainwright.anatomy.config import Config, derived
from trainwright.anatomy.families.blocks import by_name, split_attention, stack
from trainwright.anatomy.family import Family, LayerNorms
from trainwright.anatomy.parts import (
    Anatomy,
    Attention,
    ModuleWeight,
    Operation,
    Over,
    Segment,
    embedding,
    linear,
    norm,
)


@dataclass(frozen=True, kw_only=True)
class T5Config(Config):
    """`configuration_t5.py`.

    transformers 5 ties the output embedding whatever `tie_word_embeddings` says, but a checkpoint of T5 1.1 (where it
    is false) brings a matrix of its own, and loading it unties the two. `from_scratch` tells a fresh model from a
    loaded one.
    """

    model_type = "t5"
    aliases: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }
    refused: ClassVar[Mapping[str, Any]] = {"is_decoder": False}
    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int = derived(lambda config: config.num_layers)
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    dropout_rate: float = 0.1
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    from_scratch: bool = False

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate (T5 1.1: `gated-gelu`)."""
        return self.feed_forward_proj.startswith("gated-")


def t5(family: Family, config: T5Config) -> Anatomy:
    """`T5ForConditionalGeneration` of `modeling_t5.py`."""
    hidden = config.d_model
    tie = config.tie_word_embeddings or config.from_scratch
    encoder = [_block(config, layer, is_decoder=False) for layer in range(config.num_layers)]
    decoder = [_block(config, layer, is_decoder=True) for layer in range(config.num_decoder_layers)]
    return Anatomy(
        family,
        (
            Segment("", (embedding("shared", config.vocab_size, hidden, writes="source", begins=True),)),
            *stack("encoder.block", encoder, dropout=config.dropout_rate),
            Segment("", (norm("encoder.final_layer_norm", hidden, reads="source", writes="memory", over="source"),)),
            Segment("", (_decoder_words(config),)),
            *stack("decoder.block", decoder, dropout=config.dropout_rate),
            Segment(
                "",
                (
                    norm("decoder.final_layer_norm", hidden),
                    linear(
                        "lm_head",
                        "head",
                        hidden,
                        config.vocab_size,
                        writes="logits",
                        tied_to="shared" if tie else None,
                    ),
                ),
            ),
        ),
        output="lm_head",
        output_is_scaled=config.tie_word_embeddings,  # not in T5 1.1, which this key tells apart
    )


def _decoder_words(config: T5Config) -> ModuleWeight:
    """The decoder's view of the shared embedding."""
    return ModuleWeight(
        "decoder.embed_tokens",
        "embedding",
        "embedding",
        config.vocab_size,
        config.d_model,
        reads="ids",
        begins=True,
        tied_to="shared",
    )


def _block(config: T5Config, layer: int, *, is_decoder: bool) -> tuple[Operation, ...]:
    stream: Over = "tokens" if is_decoder else "source"
    feed_forward = 2 if is_decoder else 1
    own = Attention(
        config.num_heads, config.num_heads, config.d_kv, causal=is_decoder, queries_over=stream, keys_over=stream
    )
    return (
        norm("layer.0.layer_norm", config.d_model, reads=stream, over=stream),
        *_attention(config, "layer.0.SelfAttention", own, writes=stream, positions=layer == 0),
        *(_cross_attention(config) if is_decoder else ()),
        norm(f"layer.{feed_forward}.layer_norm", config.d_model, reads=stream, over=stream),
        *_feed_forward(config, f"layer.{feed_forward}.DenseReluDense", stream),
    )


def _attention(
    config: T5Config,
    path: str,
    attention: Attention,
    *,
    writes: str,
    reads: str = "normed",
    keys_read: str | None = None,
    positions: bool = False,
) -> tuple[Operation, ...]:
    """Queries, keys, values, output; the first layer also holds the table of relative positions that all share."""
    buckets, heads = config.relative_attention_num_buckets, config.num_heads
    table = embedding(f"{path}.relative_attention_bias", buckets, heads, writes="positions") if positions else None
    projections = split_attention(
        path,
        config.d_model,
        attention,
        names=("q", "k", "v", "o"),
        reads=reads,
        keys_read=keys_read,
        writes=writes,
    )
    return (table, *projections) if table else projections


def _cross_attention(config: T5Config) -> tuple[Operation, ...]:
    attention = Attention(config.num_heads, config.num_heads, config.d_kv, causal=False, keys_over="source")
    return (
        norm("layer.1.layer_norm", config.d_model),
        *_attention(config, "layer.1.EncDecAttention", attention, writes="tokens", keys_read="memory"),
    )


def _feed_forward(config: T5Config, path: str, stream: Over) -> tuple[Operation, ...]:
    up = ("wi_0", "wi_1") if config.is_gated else ("wi",)
    return (
        *(linear(f"{path}.{name}", "mlp", config.d_model, config.d_ff, writes="inner", over=stream) for name in up),
        linear(f"{path}.wo", "mlp", config.d_ff, config.d_model, reads="inner", writes=stream, over=stream),
    )


T5 = Family(
    config=T5Config,
    build=t5,
    layer="T5Block",
    norms=LayerNorms("layer.0.layer_norm", None, "layer.1.layer_norm", None),
    positions="buckets",
    does_without_padding_mask=False,
    kept_in_fp32=("wo",),
    further_names={"encoder.embed_tokens.weight": "shared.weight"},
)

RECORDS: Final = by_name(T5)

"""Pieces that the families share: attention projections, MLPs, and a model around a stack of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from trainwright.anatomy.family import Family
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

Records: TypeAlias = Mapping[str, Family]
"""By `model_type`."""

QKV = ("q", "k", "v")


def by_name(*families: Family) -> Records:
    """The records of a module, by `model_type`."""
    return {family.name: family for family in families}


def split_attention(
    path: str,
    hidden: int,
    attention: Attention,
    *,
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    qkv_bias: bool = False,
    out_bias: bool = False,
    head_norm: Sequence[Operation] = (),
    reads: str = "normed",
    keys_read: str | None = None,
    writes: str = "tokens",
) -> tuple[Operation, ...]:
    """Separate projections of queries, keys and values, norms of the heads, the attention, the output projection."""
    queries, keys = attention.heads * attention.head_dim, attention.key_value_heads * attention.head_dim
    query, key, value, out = (f"{path}.{name}" for name in names)
    over, keys_over, source = attention.queries_over, attention.keys_over, keys_read or reads
    return (
        linear(query, "query", hidden, queries, bias=qkv_bias, reads=reads, writes="q", over=over),
        linear(key, "key", hidden, keys, bias=qkv_bias, reads=source, writes="k", over=keys_over),
        linear(value, "value", hidden, keys, bias=qkv_bias, reads=source, writes="v", over=keys_over),
        *head_norm,
        attention,
        linear(out, "attention_output", queries, hidden, bias=out_bias, reads="heads", writes=writes, over=over),
    )


def head_norms(query_name: str, key_name: str, size: int, *, bias: bool = False) -> tuple[ModuleWeight, ModuleWeight]:
    """Norms of queries and keys, head by head."""
    return (
        norm(query_name, size, bias=bias, reads="q", writes="q"),
        norm(key_name, size, bias=bias, reads="k", writes="k"),
    )


def gated_mlp(
    path: str, hidden: int, inner: int, *, bias: bool = False, reads: str = "normed", writes: str = "tokens"
) -> tuple[Operation, ...]:
    """Gate and up projections, multiplied, then down (SwiGLU and its kin)."""
    return (
        linear(f"{path}.gate_proj", "mlp", hidden, inner, bias=bias, reads=reads, writes="inner"),
        linear(f"{path}.up_proj", "mlp", hidden, inner, bias=bias, reads=reads, writes="inner"),
        linear(f"{path}.down_proj", "mlp", inner, hidden, bias=bias, reads="inner", writes=writes),
    )


def plain_mlp(
    up: str, down: str, hidden: int, inner: int, *, bias: bool = True, reads: str = "normed", over: Over = "tokens"
) -> tuple[Operation, ...]:
    """Up, activation, down."""
    return (
        linear(up, "mlp", hidden, inner, bias=bias, reads=reads, writes="inner", over=over),
        linear(down, "mlp", inner, hidden, bias=bias, reads="inner", over=over),
    )


def stack(prefix: str, blocks: Sequence[tuple[Operation, ...]], *, dropout: float = 0.0) -> tuple[Segment, ...]:
    """Layers under `prefix.0`, `prefix.1` and so on, equal ones with the very same operations.

    `dropout` is that of the last result of each.
    """
    kinds: dict[tuple[Operation, ...], tuple[Operation, ...]] = {}
    return tuple(
        Segment(f"{prefix}.{index}", kinds.setdefault(block, block), is_layer=True, dropout=dropout > 0)
        for index, block in enumerate(blocks)
    )


def decoder(
    family: Family,
    layers: tuple[Segment, ...],
    *,
    vocab_size: int,
    hidden_size: int,
    tie: bool,
    tokens: str = "model.embed_tokens",
    final_norm: str = "model.norm",
    norm_bias: bool = False,
    head: str = "lm_head",
    head_bias: bool = False,
    after_embedding: tuple[Operation, ...] = (),
) -> Anatomy:
    """A causal language model: embedding, layers, final norm, output embedding."""
    logits = linear(
        head, "head", hidden_size, vocab_size, bias=head_bias, writes="logits", tied_to=tokens if tie else None
    )
    return Anatomy(
        family,
        (
            Segment("", (embedding(tokens, vocab_size, hidden_size, begins=True), *after_embedding)),
            *layers,
            Segment("", (norm(final_norm, hidden_size, bias=norm_bias), logits)),
        ),
        output=head,
    )

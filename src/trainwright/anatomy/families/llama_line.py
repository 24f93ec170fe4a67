"""The decoder of the Llama line: what a record and a config say, put together layer by layer.

Of a config it reads the fields that all share, and where it has them `sliding_window`, `use_sliding_window`,
`layer_types`, `rotary_layers`, `partial_rotary_factor`, `use_bidirectional_attention` and `resid_pdrop`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainwright.anatomy.families.blocks import QKV, decoder, gated_mlp, split_attention, stack
from trainwright.anatomy.family import Family, HeadNorms
from trainwright.anatomy.parts import Anatomy, Attention, Operation, linear, norm


def llama_line(
    family: Family, config: Any, *, path: str = "model", mlps: Iterable[tuple[Operation, ...]] | None = None
) -> Anatomy:
    """The causal language model; `mlps` are those of each layer where they are not all the family's usual one."""
    each = [_mlp(family, config)] * config.num_hidden_layers if mlps is None else mlps
    blocks = [_block(family, config, *parts) for parts in zip(_attentions(family, config), each, strict=True)]
    return decoder(
        family,
        stack(f"{path}.layers", blocks, dropout=getattr(config, "resid_pdrop", 0.0)),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        tie=config.tie_word_embeddings,
        tokens=f"{path}.embed_tokens",
        final_norm=f"{path}.norm",
    )


def split_evenly(config: Any) -> int:
    """The size of a head where the config does not name it."""
    return int(config.hidden_size // config.num_attention_heads)


def alternating(layers: int, period: int) -> tuple[str, ...]:
    """Windowed attention, but full attention in the last layer of each period."""
    return tuple("sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers))


def one_type_a_layer(layer_types: tuple[str, ...], layers: int) -> list[str]:
    """The check that transformers makes on `layer_types`."""
    if len(layer_types) != layers:
        return [f"layer_types names {len(layer_types)} layers, num_hidden_layers is {layers}"]
    return []


def _attentions(family: Family, config: Any) -> list[Attention]:
    """The attention of each layer; where no types are said, all have the window."""
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    everywhere = "sliding_attention" if getattr(config, "use_sliding_window", True) else "full_attention"
    types = getattr(config, "layer_types", None) or (everywhere,) * layers
    share = getattr(config, "partial_rotary_factor", family.rotary_share)
    turns = getattr(config, "rotary_layers", None) or (True,) * layers
    return [
        Attention(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            causal=not getattr(config, "use_bidirectional_attention", False),
            window=window if kind == "sliding_attention" else None,
            rotary=share if turned else 0.0,
        )
        for kind, turned in zip(types, turns, strict=True)
    ]


def _block(family: Family, config: Any, attention: Attention, mlp: tuple[Operation, ...]) -> tuple[Operation, ...]:
    hidden, names = config.hidden_size, family.norms
    projections = _joined_projections if family.joined_projections else _split_projections
    return (
        *_norm(names.before_attention, hidden),
        *projections(family, config, attention),
        *_norm(names.behind_attention, hidden, reads="attended", writes="tokens"),
        *_norm(names.before_mlp, hidden),
        *mlp,
        *_norm(names.behind_mlp, hidden, reads="fed", writes="tokens"),
    )


def _norm(name: str | None, size: int, *, reads: str = "tokens", writes: str = "normed") -> tuple[Operation, ...]:
    return (norm(name, size, reads=reads, writes=writes),) if name else ()


def _split_projections(family: Family, config: Any, attention: Attention) -> tuple[Operation, ...]:
    names = family.norms
    return split_attention(
        "self_attn",
        config.hidden_size,
        attention,
        qkv_bias=_said(family.qkv_bias, config),
        out_bias=_said(family.output_bias, config),
        head_norm=_head_norms(family.head_norms, attention),
        reads="normed" if names.before_attention else "tokens",
        writes="attended" if names.behind_attention else "tokens",
    )


def _head_norms(norms: HeadNorms | None, attention: Attention) -> tuple[Operation, ...]:
    if norms is None:
        return ()
    sizes = [
        attention.head_dim * (heads if norms.of_all_heads else 1)
        for heads in (attention.heads, attention.key_value_heads)
    ]
    return (
        norm(f"self_attn.{norms.query}", sizes[0], reads="q", writes="q"),
        norm(f"self_attn.{norms.key}", sizes[1], reads="k", writes="k"),
    )


def _joined_projections(family: Family, config: Any, attention: Attention) -> tuple[Operation, ...]:
    queries, keys = attention.heads * attention.head_dim, attention.key_value_heads * attention.head_dim
    bias, hidden = _said(family.qkv_bias, config), config.hidden_size
    return (
        linear("self_attn.qkv_proj", "query_key_value", hidden, queries + 2 * keys, bias=bias, writes=QKV),
        attention,
        linear("self_attn.o_proj", "attention_output", queries, hidden, reads="heads"),
    )


def _mlp(family: Family, config: Any) -> tuple[Operation, ...]:
    hidden, inner = config.hidden_size, config.intermediate_size
    reads = "normed" if family.norms.before_mlp else "tokens"
    writes = "fed" if family.norms.behind_mlp else "tokens"
    if family.joined_mlp:
        return (
            linear("mlp.gate_up_proj", "mlp", hidden, 2 * inner, reads=reads, writes="inner"),
            linear("mlp.down_proj", "mlp", inner, hidden, reads="inner", writes=writes),
        )
    return gated_mlp("mlp", hidden, inner, bias=_said(family.mlp_bias, config), reads=reads, writes=writes)


def _said(bias: bool | str, config: Any) -> bool:
    """What a record says of a bias, or the field of the config that it names."""
    return bool(getattr(config, bias)) if isinstance(bias, str) else bias

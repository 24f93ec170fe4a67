"""Layers of the Llama line, and of the mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainwright.anatomy.family import Rotation
from trainwright.anatomy.parts import Attention
from trainwright.estimate.closed import modules
from trainwright.estimate.closed import operators as op
from trainwright.estimate.closed.attention import AttentionShape, repeated
from trainwright.estimate.closed.families.experts import mixture
from trainwright.estimate.closed.step import SAMPLES, Layer, Shared, StepPass
from trainwright.estimate.closed.tape import FP32, Tape, Tensor

DROPOUT = 0.1
"""Of what attention and MLP add, in families whose config may ask for one: its size has no influence."""


def layer(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`LlamaDecoderLayer` and its like, with norms where the record has them."""
    tape, family = step.tape, step.asked.family
    norm, norms = modules.NORMS[family.norm], family.norms
    p = DROPOUT if layer.dropout else 0.0
    residual = hidden
    if norms.before_attention is not None:
        hidden = norm(tape, layer[norms.before_attention], hidden)
    hidden = attention(step, layer, hidden, shared, norm)
    if norms.behind_attention is not None:
        hidden = norm(tape, layer[norms.behind_attention], hidden)
    hidden = step.drop(hidden, p)
    hidden = _added(step, residual, hidden)
    residual = hidden
    if norms.before_mlp is not None:
        hidden = norm(tape, layer[norms.before_mlp], hidden)
    hidden = mlp(step, layer, hidden)
    if norms.behind_mlp is not None:
        hidden = norm(tape, layer[norms.behind_mlp], hidden)
    hidden = step.drop(hidden, p)
    return _added(step, residual, hidden)


def _added(step: StepPass, residual: Tensor, x: Tensor) -> Tensor:
    """The residual sum; Granite multiplies what it adds."""
    if step.asked.family.scaled_residuals:
        return op.add(step.tape, residual, op.scale(step.tape, x))
    return op.add(step.tape, residual, x)


def attention(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared, norm: modules.Norm) -> Tensor:
    """`LlamaAttention`."""
    tape, family = step.tape, step.asked.family
    names, described = family.head_norms, layer.attentions[0]
    shape = shape_of(step, described)
    mask = shared.mask if described.window is None else shared.window_mask
    repeats = step.repeats(mask, shape) or step.asked.attention == "eager"
    if "self_attn.qkv_proj" in layer:
        joined = step.linear(layer["self_attn.qkv_proj"], hidden)
        q, k, v = (op.part_of(tape, joined, size) for size in (shape.of_queries(), _keys(shape), _keys(shape)))
        q, k = heads(tape, q, shape.heads, clones=True), heads(tape, k, shape.key_heads, clones=True)
        v = heads(tape, v, shape.key_heads, clones=repeats)
    else:
        joined = None
        q = _projected(step, layer, hidden, "q_proj", names.query if names else None, shape.heads)
        k = _projected(step, layer, hidden, "k_proj", names.key if names else None, shape.key_heads)
        v = heads(tape, step.linear(layer["self_attn.v_proj"], hidden), shape.key_heads, clones=repeats)
    if described.rotary:
        assert shared.rope is not None
        q, k = ROTATIONS[family.rotation](tape, q, k, shared.rope, described.rotary)
    if family.scaled_queries:
        q = op.mul(tape, q, _factors(step, q.dtype))
    if names is not None and names.behind_rotation:
        q = norm(tape, layer[f"self_attn.{names.query}"], q)
        k = norm(tape, layer[f"self_attn.{names.key}"], k)
    p = DROPOUT if layer.dropout and family.drops_attention else 0.0
    # The result of attention has no name in `LlamaAttention.forward` that would outlive queries, keys and values.
    return step.linear(
        layer["self_attn.o_proj"], attend(step, q, k, v, mask, shape, softcap=family.softcapped, dropout=p)
    )


def _projected(step: StepPass, layer: Layer, hidden: Tensor, path: str, normed: str | None, count: int) -> Tensor:
    """Queries or keys head by head, normalised where that stands before the rotation."""
    tape, family = step.tape, step.asked.family
    x, norm, names = step.linear(layer[f"self_attn.{path}"], hidden), modules.NORMS[family.norm], family.head_norms
    if names is None or names.behind_rotation:
        return heads(tape, x, count, clones=True)
    if names.of_all_heads:
        return heads(tape, norm(tape, layer[f"self_attn.{normed}"], x), count, clones=True)
    x = heads(tape, x, count, clones=True)
    return norm(tape, layer[f"self_attn.{normed}"], x)


def _factors(step: StepPass, dtype: int) -> Tensor:
    """`get_llama_4_attn_scale`: one for each position."""
    positions = SAMPLES * step.asked.length if step.asked.batch == "packed" else complex(step.asked.length)
    return op.to(step.tape, step.tape.new(positions, FP32), dtype)


def attend(
    step: StepPass,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    shape: AttentionShape,
    *,
    softcap: bool = False,
    dropout: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """transformers' integrations/sdpa_attention.py: keys and values repeated where a mask keeps torch from it."""
    if step.repeats(mask, shape):
        k, v = repeated(step.tape, k, shape), repeated(step.tape, v, shape)
        shape = AttentionShape(shape.samples, shape.heads, shape.heads, shape.head, shape.queries, shape.keys)
    return step.attend(q, k, v, mask, shape, softcap=softcap, dropout=dropout, causal=causal)


def mlp(step: StepPass, layer: Layer, hidden: Tensor) -> Tensor:
    """The gated MLP, plain or with experts."""
    if "mlp.experts.gate_up_proj" in layer:
        return mixture(step, layer, hidden)
    if "mlp.gate_up_proj" in layer:
        return _joined_and_gated(step, layer, hidden)
    return gated(step, layer, hidden, "mlp")


def _joined_and_gated(step: StepPass, layer: Layer, hidden: Tensor) -> Tensor:
    """`Phi3MLP`, line by line: its frame holds the gate, a view of both halves, to its end."""
    up = step.linear(layer["mlp.gate_up_proj"], hidden)
    gate, up = op.split(step.tape, up, (up.elements / 2,) * 2)
    up = op.mul(step.tape, up, activation(step, gate))
    return step.linear(layer["mlp.down_proj"], up)


def gated(step: StepPass, layer: Layer, hidden: Tensor, path: str) -> Tensor:
    """`LlamaMLP`."""
    tape = step.tape
    acted = activation(step, step.linear(layer[f"{path}.gate_proj"], hidden))
    up = step.linear(layer[f"{path}.up_proj"], hidden)
    inner = op.mul(tape, acted, up)
    del acted, up
    return step.linear(layer[f"{path}.down_proj"], inner)


def activation(step: StepPass, x: Tensor) -> Tensor:
    """`silu`, or Gemma's `gelu`: one kernel forward, one backward."""
    return op.elementwise(step.tape, x)


def shape_of(step: StepPass, described: Attention) -> AttentionShape:
    """Of an attention over all tokens."""
    length = step.asked.length
    return AttentionShape(SAMPLES, described.heads, described.key_value_heads, described.head_dim, length, length)


def heads(tape: Tape, x: Tensor, count: int, *, clones: bool) -> Tensor:
    """`view(...).transpose(1, 2)`; `clones`: gradients come head by head and are copied back to token by token."""
    out = Tensor(x.storage, x.elements, x.dtype, dense=x.dense)
    if not tape.needs_gradient(x):
        return out
    elements, dtype = x.elements, x.dtype
    return tape.link(out, [x], lambda g: (tape.new(elements, dtype) if clones and count > 1 else g,))


def rotated(tape: Tape, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """`apply_rotary_pos_emb` of queries or keys."""
    cos, sin = rope
    straight = op.mul(tape, x, cos)
    crossed = op.mul(tape, _half_turned(tape, x), sin)
    return op.add(tape, straight, crossed)


def _rotated_both(tape: Tape, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor], share: float) -> tuple[Tensor, Tensor]:
    return rotated(tape, q, rope), rotated(tape, k, rope)


def _sliced_and_rotated(
    tape: Tape, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor], share: float
) -> tuple[Tensor, Tensor]:
    """Phi-3 slices off what of a head does not turn before it turns one of them, also where that is nothing."""
    if share == 1:
        apart = [(x, op.part_of(tape, x, complex(0))) for x in (q, k)]
    else:
        apart = [_apart(tape, x, share) for x in (q, k)]
    (q, rest_of_q), (k, rest_of_k) = apart
    del apart
    return joined_again(tape, rotated(tape, q, rope), rest_of_q), joined_again(tape, rotated(tape, k, rope), rest_of_k)


def _rotated_in_fp32(
    tape: Tape, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor], share: float
) -> tuple[Tensor, Tensor]:
    """OLMo's: tables in fp32, and so is all until both are cast back."""
    turned = [rotated(tape, q, rope), rotated(tape, k, rope)]
    return op.to(tape, turned[0], q.dtype), op.to(tape, turned[1], k.dtype)


def _pairs_rotated_in_fp32(
    tape: Tape, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor], share: float
) -> tuple[Tensor, Tensor]:
    """Ernie's: of neighbours, for which each layer repeats the numbers of the tables."""
    rope = _repeated_tables(tape, rope)
    turned = [_rotated_wide(tape, q, rope), _rotated_wide(tape, k, rope)]
    return op.to(tape, turned[0], q.dtype), op.to(tape, turned[1], k.dtype)


def _rotated_wide(tape: Tape, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    straight = op.mul(tape, op.to(tape, x, FP32), cos)
    crossed = op.mul(tape, op.to(tape, _half_turned(tape, x), FP32), sin)
    return op.add(tape, straight, crossed)


def _pairs_and_rest(
    tape: Tape, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor], share: float
) -> tuple[Tensor, Tensor]:
    """GLM's: a share of each head, and of that neighbours."""
    rope = _repeated_tables(tape, rope)
    turned, rest = turned_apart(tape, q, k, rope, share)
    return joined_again(tape, turned[0], rest[0]), joined_again(tape, turned[1], rest[1])


def _repeated_tables(tape: Tape, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`repeat_interleave` of half a table: as large as the whole."""
    return tape.new(rope[0].elements, rope[0].dtype), tape.new(rope[1].elements, rope[1].dtype)


def turned_apart(
    tape: Tape, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor], share: float
) -> tuple[list[Tensor], list[Tensor]]:
    """A share of queries and keys, turned, and the rest of each, for models that turn both before they join either."""
    apart = [_apart(tape, x, share) for x in (q, k)]
    return [rotated(tape, first, rope) for first, _ in apart], [rest for _, rest in apart]


def _apart(tape: Tape, x: Tensor, share: float) -> tuple[Tensor, Tensor]:
    return op.part_of(tape, x, x.elements * share), op.part_of(tape, x, x.elements * (1 - share))


def joined_again(tape: Tape, turned: Tensor, rest: Tensor) -> Tensor:
    """Both parts of a head side by side."""
    out = op.concatenated(tape, [turned, rest])
    out.headed = True
    return out


def _half_turned(tape: Tape, x: Tensor) -> Tensor:
    first, second = op.part_of(tape, x, x.elements / 2), op.part_of(tape, x, x.elements / 2)
    return op.concatenated(tape, [op.scale(tape, second), first])


def _keys(shape: AttentionShape) -> complex:
    return shape.samples * (shape.key_heads * shape.keys * shape.head)


ROTATIONS: Mapping[Rotation, Callable[[Tape, Tensor, Tensor, tuple[Tensor, Tensor], float], tuple[Tensor, Tensor]]] = {
    "halves": _rotated_both,
    "halves_and_rest": _sliced_and_rotated,
    "halves_in_fp32": _rotated_in_fp32,
    "pairs_and_rest": _pairs_and_rest,
    "pairs_in_fp32": _pairs_rotated_in_fp32,
}

"""BLOOM and MPT: positions as a slope added to the scores, for which transformers has its own attention only."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.estimate.closed import modules
from trainwright.estimate.closed import operators as op
from trainwright.estimate.closed.families.llama import heads, shape_of
from trainwright.estimate.closed.step import Layer, Shared, StepPass
from trainwright.estimate.closed.tape import FP32, Size, Tape, Tensor


def bloom_layer(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`BloomBlock`."""
    tape, p = step.tape, 0.1 if layer.dropout else 0.0
    normed = modules.layer_norm(tape, layer["input_layernorm"], hidden)
    attended = _bloom_attention(step, layer, normed, hidden, shared, p)
    normed = modules.layer_norm(tape, layer["post_attention_layernorm"], attended)
    return _bloom_mlp(step, layer, normed, attended, p)


def _bloom_mlp(step: StepPass, layer: Layer, normed: Tensor, residual: Tensor, p: float) -> Tensor:
    inner = _bloom_gelu(step.tape, step.linear(layer["mlp.dense_h_to_4h"], normed))
    out = step.linear(layer["mlp.dense_4h_to_h"], inner)
    summed = _dropped_and_added(step, out, residual, p)
    del inner, out
    return summed


def _dropped_and_added(step: StepPass, x: Tensor, residual: Tensor, p: float) -> Tensor:
    """`dropout_add`."""
    return op.add(step.tape, residual, step.drop(x, p))


def _bloom_attention(
    step: StepPass, layer: Layer, normed: Tensor, residual: Tensor, shared: Shared, p: float
) -> Tensor:
    tape, shape = step.tape, shape_of(step, layer.attentions[0])
    joined = step.linear(layer["self_attention.query_key_value"], normed)
    q, k, v = (op.copy(tape, op.part_of(tape, joined, shape.of_queries())) for _ in range(3))
    slopes = tape.new(shape.samples * (shape.heads * shape.keys), 2)
    scores = _slanted_product(tape, q, k, slopes, shape.scores())
    del slopes
    assert shared.mask is not None
    weights = op.add(tape, scores, shared.mask)
    odds = op.to(tape, op.softmax(tape, weights, to_fp32=True), q.dtype)
    context = _merged_heads(tape, op.multiply(tape, odds, v, shape.of_queries()))
    out = _dropped_and_added(step, step.linear(layer["self_attention.dense"], context), residual, p)
    del joined, scores, weights, context  # after the residual sum
    if tape.refilling is None:
        shared.lingering = odds
    return out


def _slanted_product(tape: Tape, q: Tensor, k: Tensor, slopes: Tensor, elements: Size) -> Tensor:
    """`baddbmm` with a factor: each gradient is made and then scaled."""
    k, q = op.lower(tape, k), op.lower(tape, q)
    if not tape.needs_gradient(q, k):
        return tape.new(elements, q.dtype)
    for_q, for_k = q.node is not None, k.node is not None
    kept = tape.keep(q if for_k else None, k if for_q else None)
    out = tape.new(elements, q.dtype)
    size, of_k, dtype = q.elements, k.elements, q.dtype

    def scaled(numbers: Size) -> Tensor:
        product = tape.new(numbers, dtype)
        result = tape.new(numbers, dtype)
        del product
        return result

    def backward(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        held = kept.unpack()
        first = scaled(size) if for_q else None
        second = scaled(of_k) if for_k else None
        del held
        return first, second

    del slopes
    return tape.link(out, [q, k], backward)


def _merged_heads(tape: Tape, x: Tensor) -> Tensor:
    """`_merge_heads`: laid out token by token, and its gradient head by head again."""
    elements, dtype = x.elements, x.dtype
    out = tape.new(elements, dtype)
    if not tape.needs_gradient(x):
        return out
    return tape.link(out, [x], lambda g: (tape.new(elements, dtype),))


def _bloom_gelu(tape: Tape, x: Tensor) -> Tensor:
    """`GeLUFunction`: x * 0.5 * (1 + tanh), operator by operator, and its gradient likewise; it keeps x."""
    elements, dtype = x.elements, x.dtype

    def new() -> Tensor:
        return tape.new(elements, dtype)

    kept = tape.keep(x) if tape.needs_gradient(x) else None
    half, factor = new(), _tanh(new)
    factor = new()  # 1 +
    out = new()
    del half, factor
    if kept is None:
        return out

    def backward(g: Tensor) -> tuple[Tensor]:
        held = kept.unpack()
        tanh = _tanh(new)
        slope = _bloom_slope(new)
        result = new()
        del tanh, slope, held
        return (result,)

    return tape.link(out, [x], backward)


def _tanh(new: Callable[[], Tensor]) -> Tensor:
    """`tanh(0.79788456 * x * (1 + 0.044715 * x * x))`."""
    scaled, cubic = new(), new()
    for _ in ("* x", "1 +"):
        cubic = new()
    argument = new()
    del scaled, cubic
    result = new()
    del argument
    return result


def _bloom_slope(new: Callable[[], Tensor]) -> Tensor:
    """`0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)`."""
    half, steep = new(), new()
    steep = new()  # 1 -
    bent = new()
    for _ in ("* x", "0.79788456 +"):
        bent = new()
    inner = new()
    del steep, bent
    first = new()
    del half, inner
    second = new()
    second = new()  # 0.5 *
    result = new()
    del first, second
    return result


def mpt_layer(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`MptBlock`, which holds what its attention returned to its end."""
    tape = step.tape
    normed = modules.layer_norm(tape, layer["norm_1"], hidden)
    attended = _mpt_attention(step, layer, normed, shared)
    hidden = op.add(tape, attended, hidden)
    normed = modules.layer_norm(tape, layer["norm_2"], hidden)
    hidden = _mpt_mlp(step, layer, normed, hidden)
    del normed, attended
    return hidden


def _mpt_mlp(step: StepPass, layer: Layer, normed: Tensor, residual: Tensor) -> Tensor:
    inner = op.elementwise(step.tape, step.linear(layer["ffn.up_proj"], normed))
    out = step.linear(layer["ffn.down_proj"], inner)
    summed = op.add(step.tape, out, residual)
    del inner, out
    return summed


def _mpt_attention(step: StepPass, layer: Layer, normed: Tensor, shared: Shared) -> Tensor:
    tape, shape = step.tape, shape_of(step, layer.attentions[0])
    joined = step.linear(layer["attn.Wqkv"], normed)
    pieces = op.split(tape, joined, (shape.of_queries(),) * 3)
    q, k, v = (heads(tape, x, shape.heads, clones=x is not pieces[0]) for x in pieces)
    del pieces
    assert shared.mask is not None
    scores = op.scale(tape, op.multiply(tape, op.copy(tape, q), op.copy(tape, k), shape.scores()))
    dtype = step.asked.weight_dtype if step.sharding is not None else FP32  # FSDP2 casts what a layer is given
    slopes = Tensor(None, complex(shape.heads * shape.keys), dtype)
    scores = op.add(tape, scores, slopes)
    scores = op.masked(tape, scores, shared.mask, scores.elements)
    odds = op.to(tape, op.softmax(tape, op.to(tape, scores, FP32), to_fp32=True), v.dtype)
    context = _merged_heads(tape, op.multiply(tape, odds, op.copy(tape, v), shape.of_queries()))
    out = step.linear(layer["attn.out_proj"], context)
    del joined, q, k, v, scores, context
    if tape.refilling is None:
        shared.lingering = odds
    return out

"""BLOOM and MPT: positions as a slope added to the scores, for which transformers has its own attention only."""

from __future__ import annotations

from trainwright.estimate.closed import modules
from trainwright.estimate.closed import operators as op
from trainwright.estimate.closed.families.llama import heads, shape_of
from trainwright.estimate.closed.step import Layer, Shared, Step
from trainwright.estimate.closed.tape import FP32, Tape, Tensor


def bloom_layer(step: Step, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`BloomBlock`."""
    tape, p = step.tape, 0.1 if layer.dropout else 0.0
    normed = modules.layer_norm(tape, layer["input_layernorm"], hidden)
    attended = _bloom_attention(step, layer, normed, hidden, shared, p)
    normed = modules.layer_norm(tape, layer["post_attention_layernorm"], attended)
    inner = _bloom_gelu(tape, step.linear(layer["mlp.dense_h_to_4h"], normed))
    out = step.drop(step.linear(layer["mlp.dense_4h_to_h"], inner), p)
    del inner
    return op.add(tape, attended, out)


def _bloom_attention(step: Step, layer: Layer, normed: Tensor, residual: Tensor, shared: Shared, p: float) -> Tensor:
    tape, shape = step.tape, shape_of(step, layer.attentions[0])
    joined = step.linear(layer["self_attention.query_key_value"], normed)
    q, k, v = (op.copy(tape, op.part_of(tape, joined, shape.of_queries())) for _ in range(3))
    slopes = tape.new(shape.samples * (shape.heads * shape.keys), 2)
    scores = _slanted_product(tape, q, k, slopes, shape.scores())
    del slopes
    assert shared.mask is not None
    weights = op.add(tape, scores, shared.mask)
    odds = op.to(tape, op.softmax(tape, weights, to_fp32=True), q.dtype)
    out = op.copy(tape, op.multiply(tape, odds, v, shape.of_queries()))
    out = step.drop(step.linear(layer["self_attention.dense"], out), p)
    del joined, scores, weights
    if tape.refilling is None:
        shared.lingering = odds
    return op.add(tape, residual, out)


def _slanted_product(tape: Tape, q: Tensor, k: Tensor, slopes: Tensor, elements: complex) -> Tensor:
    """`baddbmm` with a factor: each gradient is made and then scaled."""
    out = op.multiply(tape, q, k, elements)
    if out.node is None:
        return out
    inner = out.node.backward
    assert inner is not None

    def backward(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        first, second = inner(g)
        for x in (first, second):
            if x is not None:
                tape.passing(x.elements * x.dtype, part="temporaries")
        return first, second

    out.node.backward = backward
    del slopes
    return out


def _bloom_gelu(tape: Tape, x: Tensor) -> Tensor:
    """`BloomGelu`, a function of its own in Python: seven operators forward, some twenty backward."""
    elements, dtype = x.elements, x.dtype
    size = elements * dtype
    if not tape.needs_gradient(x):
        tape.passing(*(size,) * 4, part="temporaries")
        return tape.new(elements, dtype)
    kept = tape.keep(x)
    tape.passing(*(size,) * 4, part="temporaries")
    out = tape.new(elements, dtype)

    def backward(g: Tensor) -> tuple[Tensor]:
        held = kept.unpack()
        tape.passing(*(size,) * 5, part="temporaries")
        result = tape.new(elements, dtype)
        del held
        return (result,)

    return tape.link(out, [x], backward)


def mpt_layer(step: Step, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`MptBlock`."""
    tape = step.tape
    normed = modules.layer_norm(tape, layer["norm_1"], hidden)
    hidden = op.add(tape, _mpt_attention(step, layer, normed, shared), hidden)
    normed = modules.layer_norm(tape, layer["norm_2"], hidden)
    inner = op.elementwise(tape, step.linear(layer["ffn.up_proj"], normed))
    out = step.linear(layer["ffn.down_proj"], inner)
    del inner
    return op.add(tape, out, hidden)


def _mpt_attention(step: Step, layer: Layer, normed: Tensor, shared: Shared) -> Tensor:
    tape, shape = step.tape, shape_of(step, layer.attentions[0])
    joined = step.linear(layer["attn.Wqkv"], normed)
    q, k, v = (heads(tape, x, shape.heads, clones=True) for x in op.split(tape, joined, (shape.of_queries(),) * 3))
    assert shared.mask is not None
    scores = op.scale(tape, op.multiply(tape, op.copy(tape, q), op.copy(tape, k), shape.scores()))
    slopes = Tensor(None, complex(shape.heads * shape.keys), FP32)
    scores = op.add(tape, scores, slopes)
    scores = op.masked(tape, scores, shared.mask, scores.elements)
    odds = op.to(tape, op.softmax(tape, op.to(tape, scores, FP32), to_fp32=True), v.dtype)
    out = op.copy(tape, op.multiply(tape, odds, op.copy(tape, v), shape.of_queries()))
    out = step.linear(layer["attn.out_proj"], out)
    del joined, scores
    if tape.refilling is None:
        shared.lingering = odds
    return out

"""T5: an encoder and a decoder whose attention scores carry a learned bias, which keeps flash attention away."""

from __future__ import annotations

from functools import partial

from trainwright.estimate.closed import attention as kernels
from trainwright.estimate.closed import modules
from trainwright.estimate.closed import operators as op
from trainwright.estimate.closed.attention import AttentionShape
from trainwright.estimate.closed.families.layer_stack import (
    Model,
    as_logits,
    begin,
    boundary,
    demanded,
    end,
    pair_mask,
    through,
)
from trainwright.estimate.closed.families.llama import heads
from trainwright.estimate.closed.loss import transformers_loss, workers_loss
from trainwright.estimate.closed.modules import Module
from trainwright.estimate.closed.step import SAMPLES, SORTED_ABOVE, Layer, Shared, StepPass
from trainwright.estimate.closed.tape import FP32, HALF, Leaf, Size, Tape, Tensor

DROPOUT = 0.1
INDEX, BOOL = 8, 1


def loss(step: StepPass, model: Model) -> Tensor:
    """`T5ForConditionalGeneration` and the workers' loss on the response."""
    rows = SAMPLES * step.asked.target_length
    logits = _logits(step, model)
    if step.asked.recipe == "transformers":
        return transformers_loss(step, logits, rows, upcast=False)
    return workers_loss(step, logits, rows, round(logits.elements.imag / rows.imag), shifted=False)


def _logits(step: StepPass, model: Model) -> Tensor:
    tape, asked = step.tape, step.asked
    words, encoder_norm, _, after = (list(layer.modules.values()) for layer in model.outside)
    begin(step, model)
    encoder = [stage for stage in model.stages if stage.stack == 0]
    decoder = [stage for stage in model.stages if stage.stack == 1]
    embedded = demanded(step, modules.embedding(tape, words[0], SAMPLES * asked.length, sorted_above=asked.long))
    embedded = boundary(step, embedded, "embedding backward")
    padded = asked.batch == "padded"
    shared = Shared(mask=pair_mask(step, asked.length, asked.length) if padded else None)
    hidden = through(step, encoder, encoder_layer, step.drop(embedded, DROPOUT), shared)
    tape.mark("encoder's end")
    memory = step.drop(norm(tape, encoder_norm[0], hidden), DROPOUT)
    del embedded, hidden, shared
    ids = SAMPLES * asked.target_length
    embedded = demanded(step, modules.embedding(tape, words[0], ids, sorted_above=abs(ids) > SORTED_ABOVE))
    embedded = boundary(step, embedded, "decoder's embedding backward")
    shared = Shared(memory=memory)
    if padded:
        shared.memory_mask = pair_mask(step, asked.target_length, asked.length)
    hidden = through(step, decoder, decoder_layer, step.drop(embedded, DROPOUT), shared, len(encoder))
    tape.mark("head")
    hidden = step.drop(norm(tape, after[0], hidden), DROPOUT)
    del embedded, shared
    scaled = op.scale(tape, hidden) if asked.output_is_scaled else hidden
    logits = as_logits(step, step.linear(after[1], scaled))
    del hidden, scaled  # `decoder_outputs` goes first
    return end(step, model, logits)


def encoder_layer(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`T5Block` of the encoder."""
    hidden, bias = _self_attention(step, layer, hidden, shared, step.asked.length, causal=False)
    hidden = _feed_forward(step, layer, hidden, 1)
    del bias  # `T5Block` returns it
    return hidden


def decoder_layer(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    """`T5Block` of the decoder, which attends to the encoder's result too."""
    hidden, bias = _self_attention(step, layer, hidden, shared, step.asked.target_length, causal=True)
    hidden = _cross_attention(step, layer, hidden, shared)
    hidden = _feed_forward(step, layer, hidden, 2)
    del bias
    return hidden


def norm(tape: Tape, module: Module, x: Tensor) -> Tensor:
    """`T5LayerNorm`."""
    scaled = _scaled(tape, x, module.columns)
    if module.weight.dtype == HALF:
        scaled = op.to(tape, scaled, HALF)
    return op.mul(tape, module.weight.tensor, scaled)


def _scaled(tape: Tape, x: Tensor, columns: int) -> Tensor:
    squares = op.power(tape, op.to(tape, x, FP32))
    variance = op.mean(tape, squares, x.elements / columns)
    del squares
    return op.mul(tape, x, op.elementwise(tape, op.shift(tape, variance), keep_output=True, temporaries=1))


def _self_attention(
    step: StepPass, layer: Layer, hidden: Tensor, shared: Shared, length: int, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The hidden states, and the bias that was made or handed on."""
    tape, path = step.tape, "layer.0.SelfAttention"
    described = layer.attentions[0]
    count, width = described.heads, described.head_dim
    shape = AttentionShape(SAMPLES, count, count, width, length, length, alone=step.asked.alone)
    normed = norm(tape, layer["layer.0.layer_norm"], hidden)
    q, k, v = (heads(tape, step.linear(layer[f"{path}.{name}"], normed), shape.heads, clones=False) for name in "qkv")
    bias = shared.bias
    if f"{path}.relative_attention_bias" in layer:
        bias = _relative_bias(step, layer[f"{path}.relative_attention_bias"], shape, causal=causal)
        if tape.refilling is None:
            shared.bias = bias
    assert bias is not None
    out = _biased(step, q, k, v, bias, shared.mask, shape, causal=causal, laid_out=False)
    out = step.linear(layer[f"{path}.o"], out)
    del q, k, v  # what they were made of stays until the residual sum
    return _bounded(step, op.add(tape, hidden, step.drop(out, DROPOUT))), bias


def _cross_attention(step: StepPass, layer: Layer, hidden: Tensor, shared: Shared) -> Tensor:
    tape, path, asked = step.tape, "layer.1.EncDecAttention", step.asked
    described = layer.attentions[1]
    count, width = described.heads, described.head_dim
    shape = AttentionShape(SAMPLES, count, count, width, asked.target_length, asked.length, alone=asked.alone)
    assert shared.memory is not None
    normed = norm(tape, layer["layer.1.layer_norm"], hidden)
    q = heads(tape, step.linear(layer[f"{path}.q"], normed), shape.heads, clones=False)
    k, v = (heads(tape, step.linear(layer[f"{path}.{n}"], shared.memory), shape.heads, clones=False) for n in "kv")
    bias = shared.cross_bias
    if "layer.0.SelfAttention.relative_attention_bias" in layer:
        bias = tape.new(complex(shape.heads * shape.queries * shape.keys), q.dtype)
        if asked.checkpointing != "none" and step.training:
            bias = Tensor(bias.storage, bias.elements, bias.dtype, Leaf(bias.storage))
        if tape.refilling is None:
            shared.cross_bias = bias
    assert bias is not None
    out = _biased(step, q, k, v, bias, shared.memory_mask, shape, causal=False, laid_out=True)
    out = step.linear(layer[f"{path}.o"], out)
    del q, k, v  # what they were made of stays until the residual sum
    return _bounded(step, op.add(tape, hidden, step.drop(out, DROPOUT)))


def _feed_forward(step: StepPass, layer: Layer, hidden: Tensor, number: int) -> Tensor:
    tape, path = step.tape, f"layer.{number}.DenseReluDense"
    normed = norm(tape, layer[f"layer.{number}.layer_norm"], hidden)
    out = _dense(step, layer, path, normed)
    del normed
    return _bounded(step, op.add(tape, hidden, step.drop(out, DROPOUT)))


def _dense(step: StepPass, layer: Layer, path: str, normed: Tensor) -> Tensor:
    """`T5DenseActDense`, or `T5DenseGatedActDense`, whose frame holds both factors to its end."""
    tape, out = step.tape, layer[f"{path}.wo"]
    if f"{path}.wi" in layer:
        inner = op.elementwise(tape, step.linear(layer[f"{path}.wi"], normed), keep_output=True)
    else:
        acted = _new_gelu(tape, step.linear(layer[f"{path}.wi_0"], normed))
        up = step.linear(layer[f"{path}.wi_1"], normed)
        inner = op.mul(tape, acted, up)
    inner = step.drop(inner, DROPOUT)
    inner = op.to(tape, inner, out.weight.dtype)
    return step.linear(out, inner)


def _bounded(step: StepPass, hidden: Tensor) -> Tensor:
    """`T5Block` clamps what is fp16: hidden states are where the model was loaded so, but for weights kept in fp32."""
    if not step.asked.kept_fp32 or hidden.dtype != HALF:
        return hidden
    return op.elementwise(step.tape, hidden)


def _new_gelu(tape: Tape, x: Tensor) -> Tensor:
    from trainwright.estimate.closed.families.gpt import new_gelu

    return new_gelu(tape, x)


def _relative_bias(step: StepPass, table: Module, shape: AttentionShape, *, causal: bool) -> Tensor:
    """`compute_bias`: buckets of distances, and a number of each head for each bucket."""
    tape, pairs = step.tape, complex(shape.queries * shape.keys)
    distances = tape.new(pairs, INDEX)
    buckets = _buckets(tape, pairs, causal=causal)
    values = modules.embedding(tape, table, pairs, sorted_above=abs(pairs) > SORTED_ABOVE, indices=buckets)
    del distances
    return values


def _buckets(tape: Tape, pairs: Size, *, causal: bool) -> Tensor:
    """`_relative_position_bucket`, line by line: what a name held goes when it is bound again."""
    buckets = None
    if causal:
        zeros = tape.new(pairs, INDEX)
        capped = tape.new(pairs, INDEX)
        del zeros
        position = tape.new(pairs, INDEX)
        del capped
    else:
        later = tape.new(pairs, BOOL)
        buckets = tape.new(pairs, INDEX)
        del later
        buckets = tape.new(pairs, INDEX)  # times half their number
        buckets = tape.new(pairs, INDEX)  # added to 0
        position = tape.new(pairs, INDEX)
    small = tape.new(pairs, BOOL)
    large = tape.new(pairs, FP32)
    for _ in ("/ max_exact", "log", "/ log", "* (num_buckets - max_exact)"):
        large = tape.new(pairs, FP32)
    for _ in ("to(long)", "max_exact +"):
        large = tape.new(pairs, INDEX)
    most = tape.new(pairs, INDEX)
    capped = tape.new(pairs, INDEX)
    del most
    large = capped
    del capped
    chosen = tape.new(pairs, INDEX)
    if buckets is None:
        buckets = tape.new(pairs, INDEX)
    del chosen, position, small, large
    return buckets


def _biased(
    step: StepPass,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    shape: AttentionShape,
    *,
    causal: bool,
    laid_out: bool,
) -> Tensor:
    """Attention with a bias: transformers' `create_position_bias_mask`, then torch's memory-efficient kernel."""
    tape, asked = step.tape, step.asked
    if asked.attention == "eager":
        out, _ = kernels.eager(
            tape, q, k, v, mask, shape, dropout=DROPOUT, training=step.training, bias=bias, keeps_fp32=False
        )
        return out
    pairs = None
    if mask is not None:
        bias = op.masked(tape, bias, mask, shape.scores())
    elif causal:
        pairs = tape.new(complex(shape.queries * shape.keys), BOOL)
        bias = op.masked(tape, bias, pairs, bias.elements)
    if not laid_out:
        permuted, bias = bias, op.copy(tape, bias)  # `.contiguous()` of what was permuted
        del pairs, permuted
    # Casts go when the kernel has run, and the mask when `sdpa_attention_forward` returns.
    lower = partial(op.lower, tape)
    return kernels.fused(tape, "efficient", lower(q), lower(k), lower(v), lower(bias), shape)

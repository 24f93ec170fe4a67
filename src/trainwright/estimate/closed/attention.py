"""scaled_dot_product_attention and transformers' own attention: what each kernel keeps and takes.

aten/src/ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp; which kernel is taken is decided as in
`estimate.trace.kernels`, and kernels' own temporaries are those of `estimate.trace.temporaries`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.estimate.capabilities import PREFERS_CUDNN
from trainwright.estimate.closed import operators as op
from trainwright.estimate.closed.tape import FP32, HALF, Size, Tape, Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Of one attention: samples are counted by `Size`, the rest is for each sample."""

    samples: Size
    heads: int
    key_heads: int
    head: int
    queries: int
    keys: int
    alone: bool = False
    """There is one sample, so that what is the same for all samples is summed up over none."""

    def of_queries(self) -> Size:
        """Elements of queries and of the result."""
        return self.samples * (self.heads * self.queries * self.head)

    def of_keys(self) -> Size:
        """Elements of keys once every query head has its own."""
        return self.samples * (self.heads * self.keys * self.head)

    def scores(self) -> Size:
        """Elements of the weights of queries on keys."""
        return (1 if self.alone else self.samples) * complex(self.heads * self.queries * self.keys)


def repeated(tape: Tape, x: Tensor, shape: AttentionShape) -> Tensor:
    """`repeat_kv`: keys and values for each query head; a single one is only looked at from each of them."""
    if shape.heads == shape.key_heads:
        return x
    return (op.expanded if shape.key_heads == 1 else op.copy)(tape, x, shape.of_keys())


def kernel_of(
    wanted: str,
    dtype: int,
    half_kind: str,
    capability: tuple[int, int],
    shape: AttentionShape,
    *,
    masked: bool,
    grouped: bool,
) -> str:
    """Return which kernel torch takes (cuda/sdp_utils.cpp, `select_sdp_backend`)."""
    half = dtype == HALF and capability >= (8, 0)
    efficient = dtype == FP32 or half or (dtype == HALF and half_kind == "fp16")
    same_heads = shape.heads == shape.key_heads
    first = capability[0] in PREFERS_CUDNN
    possible = {
        "flash": half and not masked and shape.head <= 256 and (grouped or same_heads),
        "efficient": efficient and same_heads,
        "cudnn": half and shape.head % 8 == 0 and shape.head <= (256 if first else 128),
        "math": True,
    }
    own = ("cudnn", "flash", "efficient", "math") if first else ("flash", "efficient", "math")
    order = own if wanted == "auto" else (wanted, "math")
    return next(name for name in order if possible[name])


def fused(
    tape: Tape, kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape
) -> Tensor:
    """One fused kernel: queries, keys, values, result and the log of the sums are kept."""
    dtype = q.dtype
    bias = _bias(tape, mask, shape, dtype) if mask is not None else None
    learned = bias is not None and bias.node is not None
    if bias is not None and learned and bias.elements != shape.scores():
        bias = op.expanded(tape, bias, shape.scores())
    rows = shape.queries if kernel != "efficient" else _up(shape.queries, 32)
    if kernel == "efficient" and not tape.needs_gradient(q, k, v):
        return tape.new(shape.of_queries(), dtype)
    out = tape.new(shape.of_queries(), dtype)
    sums = tape.new(shape.samples * (shape.heads * rows), FP32)
    if not tape.needs_gradient(q, k, v):
        out.headed = q.headed and kernel in ("flash", "cudnn")
        return out
    kept = tape.keep(bias, k, q, v, sums, out)
    sizes = [q.elements, k.elements, v.elements]
    inputs = [q, k, v]
    if bias is not None and learned:
        sizes.append(shape.scores())
        inputs.append(bias)
    headed = q.headed and kernel in ("flash", "cudnn")
    wanted = [x.node is not None for x in inputs]
    del sums, bias

    def backward(g: Tensor) -> tuple[Tensor | None, ...]:
        held = kept.unpack()
        results = [tape.new(n, dtype) for n in sizes]
        tape.passing(*_backward_temporaries(kernel, shape, dtype))
        del held
        return tuple(r if w else None for r, w in zip(results, wanted, strict=True))

    out = tape.link(out, inputs, backward)
    out.headed = headed
    return out


def _backward_temporaries(kernel: str, shape: AttentionShape, element: int) -> list[Size]:
    b, h, s, t, d = shape.samples, shape.heads, shape.queries, shape.keys, shape.head
    if kernel == "flash":
        sizes = [4 * b * h * _up(s, 128), 4 * b * _up(s, 128) * h * _up(d, 32 if d <= 128 else 64)]
        return sizes + [element * b * t * h * d] * 2 if shape.key_heads != h else sizes
    if kernel == "cudnn":
        expanded = 2 * element * b * h * t * d if shape.key_heads != h else 0j
        return [4 * b * h * s * d + 4 * b * h * s + expanded]
    delta = 4 * b * h * s
    if element == FP32:
        return [delta]
    rows, columns = (64, 64) if d <= 64 else (128, 128) if d <= 128 else (128, 64)
    workspace = -(-s // rows) * -(-d // columns) * (4 * rows * columns + 16)
    if d > 128:
        splits = -(-t // columns)
        workspace += 2 * 4 * splits * columns * _up(d, rows)
    return [delta, b * h * workspace]


def _bias(tape: Tape, mask: Tensor, shape: AttentionShape, dtype: int) -> Tensor:
    """A mask of bools becomes one of numbers, with rows that begin at multiples of 16 elements."""
    if mask.dtype == 1:
        bias = tape.new(mask.elements, dtype)
        tape.passing(mask.elements, part="temporaries")
    else:
        bias = mask
    if shape.keys % 16:
        padded = mask.elements / shape.keys * _up(shape.keys, 16)
        bias = tape.new(padded, dtype)
    return bias


def math(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    shape: AttentionShape,
    *,
    causal: bool,
    dropout: float,
    training: bool,
) -> Tensor:
    """`_scaled_dot_product_attention_math`: scores and weights in memory, all in fp32, as autocast is over by then."""
    own, autocast = q.dtype, tape.autocast
    tape.autocast = None
    q, k, v = (op.to(tape, x, FP32) for x in (q, k, v))
    q, k, v = op.scale(tape, q), repeated(tape, k, shape), _laid_out(tape, repeated(tape, v, shape))
    scores = op.multiply(tape, q, op.scale(tape, k), shape.scores())
    if mask is not None or causal:
        bias = tape.new(complex(shape.queries * shape.keys), FP32)
        scores = op.add(tape, scores, bias)
        del bias
    weights = op.softmax(tape, scores, to_fp32=False)
    del scores
    weights = op.dropout(tape, weights, dropout, training=training)
    out = op.to(tape, op.multiply(tape, weights, v, shape.of_queries()), own)
    tape.autocast = autocast
    return op.copy(tape, out)


def eager(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    shape: AttentionShape,
    *,
    dropout: float,
    training: bool,
    softcap: bool = False,
    bias: Tensor | None = None,
    keeps_fp32: bool = True,
) -> tuple[Tensor, Tensor]:
    """`eager_attention_forward` of transformers: softmax in fp32, weights cast back; `softcap`: a tanh before it.

    Returns the result, and the weights of each pair.
    """
    own = q.dtype
    k, v = repeated(tape, k, shape), repeated(tape, v, shape)
    q, k, v = (_laid_out(tape, x) for x in (q, k, v))
    weights = op.scale(tape, op.multiply(tape, q, k, shape.scores()))
    if bias is not None:
        weights = op.add(tape, weights, bias)
    if softcap:
        weights = op.scale(tape, weights)
        weights = op.elementwise(tape, weights, keep_output=True)
        weights = op.scale(tape, weights)
    if mask is not None:
        weights = op.add(tape, weights, mask)
    weights = op.to(tape, op.softmax(tape, weights, to_fp32=keeps_fp32), own if keeps_fp32 else weights.dtype)
    weights = op.dropout(tape, weights, dropout, training=training)
    return op.copy(tape, op.multiply(tape, weights, v, shape.of_queries())), weights


def _laid_out(tape: Tape, x: Tensor) -> Tensor:
    """`matmul` copies a piece of a joined projection, whose heads it cannot take for one dimension."""
    return x if x.dense else op.copy(tape, x)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

"""Bytes that the kernels between the matrix products move, by operation, forward and backward.

Counted from the kernels that PyTorch runs: each elementary operation reads its inputs and writes its result once.
`s` is the width of the residual stream in bytes, `c` that of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trainwright.anatomy.adapters import Adapter
from trainwright.anatomy.parts import Anatomy, Attention, ModuleWeight, Over, Segment
from trainwright.estimate.request import Request

CAST_BYTES: Final = 4 + 2
"""Of turning one number from fp32 to 16 bit, or back."""
SOFTMAX_ROW: Final = 48 * 1024 // 4
"""Numbers in fp32 that a block's shared memory holds, as long as a kernel asks for no more of it."""
AROUND_LAYERS: Final = 25
"""Kernels on a few numbers before and behind the layers: positions, rotary tables, masks, labels, the loss's scale."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes and number of kernels of one pass, forward and backward."""

    forward: float = 0.0
    backward: float = 0.0
    forward_kernels: float = 0.0
    backward_kernels: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.forward + other.forward,
            self.backward + other.backward,
            self.forward_kernels + other.forward_kernels,
            self.backward_kernels + other.backward_kernels,
        )

    def times(self, elements: float, kernels: float = 1.0) -> Moved:
        """Bytes of `elements`, where this is the bytes of one; `kernels` times as many kernels."""
        return Moved(
            self.forward * elements,
            self.backward * elements,
            self.forward_kernels * kernels,
            self.backward_kernels * kernels,
        )


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of an element: of the residual stream, of the arithmetic, of base weights and of what is trained."""

    stream: int
    compute: int
    weight: int
    trained: int
    casts: bool
    """Autocast turns what is wider than the arithmetic into its dtype before each product."""

    @staticmethod
    def of(request: Request) -> Widths:
        """As the request's dtypes and autocast make them."""
        half = 4 if request.precision == "fp32" else 2
        base = {"fp32": 4, "bf16": 2, "fp16": 2}[request.base_dtype]
        lora = request.method.type != "full"
        stream = 4 if request.method.upcast_frozen != "none" else base
        compute = half if request.autocast else base
        # Shards are cast while they are gathered (the policy's param_dtype), so that the layers see 16 bit.
        if request.strategy in ("fsdp2", "fsdp1", "zero1", "zero2", "zero3"):
            stream, compute = (stream if request.method.upcast_frozen != "none" else half), half
        trained = (4 if request.method.adapter_dtype == "fp32" else base) if lora else base
        return Widths(stream, compute, base, trained, request.autocast and stream > compute)


def norm(widths: Widths, *, is_rms: bool, fused: bool, trained: bool) -> Moved:
    """One element of a normalisation.

    transformers writes RMSNorm out: to fp32, square, mean, multiply, back, times the weight. LayerNorm is one kernel.
    """
    s = widths.stream
    if fused:
        return Moved(2 * s, (4 if trained else 3) * s, 1, 2)
    if not is_rms:
        cast = CAST_BYTES if widths.casts else 0
        return Moved(2 * s + cast, (5 if trained else 4) * s + cast, 1 + bool(cast), 2)
    # To fp32 6, square 8, mean 4, times 8, back 6, times the weight 4. The way back as counted with a dispatch mode on
    # Mistral in transformers 5.23 (torch 2.13), of which 10 for the gradient of the weight.
    narrow = s == 2
    return Moved(
        36 if narrow else 28,
        (96 if narrow else 94) - (0 if trained else 10),
        6 + 2 * narrow,
        12 + 2 * (narrow + trained),
    )


def layer(anatomy: Anatomy, segment: Segment, request: Request, widths: Widths, tokens: Mapping[Over, int]) -> Moved:
    """Everything between the products of one segment, adapters and the loss left out."""
    total = Moved()
    for operation in segment.operations:
        if isinstance(operation, Attention):
            if operation.rotary:
                total += _rotary(anatomy, operation, request, widths, tokens[operation.queries_over])
            continue
        count = tokens[operation.over]
        if operation.kind == "norm":
            total += _norm_of(anatomy, operation, segment, request, widths, count)
        elif operation.kind == "embedding":
            total += _embedding(anatomy, operation, segment, request, widths, count)
        elif operation.is_matmul:
            total += _around(anatomy, operation, segment, request, widths, count)
    return total + _activation(anatomy, segment, request, widths, tokens)


def _norm_of(
    anatomy: Anatomy, weight: ModuleWeight, segment: Segment, request: Request, widths: Widths, count: int
) -> Moved:
    trained, fused = request.method.type == "full", "norm" in request.fused_kernels
    with_shifts = any(o.bias for o in segment.operations if isinstance(o, ModuleWeight) and o.kind == "norm")
    is_rms = anatomy.family.norm != "layer" and not with_shifts  # those of a vision tower have shifts
    one = norm(widths, is_rms=is_rms, fused=fused, trained=trained)
    if anatomy.family.norm == "rms_of_one_more" and not fused:
        one += Moved(0, 0, 2, trained)  # on a vector: to fp32, and one more
    return one.times(count * weight.columns * _heads_normed(weight, segment))


def _embedding(
    anatomy: Anatomy, table: ModuleWeight, segment: Segment, request: Request, widths: Widths, count: int
) -> Moved:
    """Rows are looked up; on the way back tokens are sorted, and their gradients added to a table of zeros.

    An output layer that shares the table has a gradient of its own, which is added to that.
    """
    s, w = widths.stream, widths.weight
    if request.method.type != "full":
        return Moved(2 * s, 0, 1, 0).times(count * table.columns)
    total = Moved(2 * s, 2 * s, 1, 10).times(count * table.columns)
    if segment.is_layer:
        return total
    shared = any(
        isinstance(o, ModuleWeight) and o.is_matmul and o.tied_to is not None
        for each in anatomy.segments
        for o in each.operations
    )
    return total + Moved(0, (4 if shared else 1) * w, 0, 1 + shared).times(table.rows * table.columns)


def _rotary(anatomy: Anatomy, attention: Attention, request: Request, widths: Widths, count: int) -> Moved:
    """Queries and keys are turned; the tables are as wide as the residual stream, and so is all between."""
    c, share = widths.compute, anatomy.family.rotary_share
    whole = count * (attention.heads + attention.key_value_heads) * attention.head_dim
    if "rotary" in request.fused_kernels:
        return Moved(2 * c, 2 * c, 1, 1).times(whole * share, 2)
    turned = (Moved(32, 44, 6, 10) if widths.casts else Moved(10 * c, 12 * c, 5, 7)).times(whole * share, 2)
    return turned + (Moved(2 * c, 4 * c, 1, 3).times(whole, 2) if share < 1 else Moved())


def _heads_normed(weight: ModuleWeight, segment: Segment) -> int:
    """How often the norm of a head's queries or keys is applied to a token; 1 for norms of whole tokens."""
    attention = next((o for o in segment.operations if isinstance(o, Attention)), None)
    if attention is None or weight.columns != attention.head_dim:
        return 1
    return {"q": attention.heads, "k": attention.key_value_heads}.get(weight.writes[0], 1)


def drops(anatomy: Anatomy, segment: Segment) -> bool:
    """Whether results pass a dropout."""
    return segment.dropout or (anatomy.family.drops_before_norms and segment.is_layer)


def _around(
    anatomy: Anatomy, weight: ModuleWeight, segment: Segment, request: Request, widths: Widths, count: int
) -> Moved:
    """What stands around one product: cast of its input, bias, dropout, residual sum; the experts' routing."""
    s, c = widths.stream, widths.compute
    total = Moved()
    if widths.casts and weight.reads == "normed":
        total += Moved(s + c, s + c, 1, 1).times(count * weight.columns)
    if weight.reads == "normed":  # gradients of what several products read are added up
        total += Moved(0, 3 * s, 0, 1).times(count * weight.columns)
    if weight.bias and request.method.type == "full":
        total += Moved(0, c, 0, 1).times(count * weight.rows)
    if segment.is_layer and weight.writes in (("tokens",), ("source",)):
        chosen = max(1, weight.active)
        total += Moved(2 * s + c, 3 * s, 1, 1).times(count * weight.rows * chosen)
        if anatomy.family.scaled_residuals:
            total += Moved(2 * c, 2 * c, 1, 1).times(count * weight.rows)
        if drops(anatomy, segment):
            total += Moved(2 * c + 1, 2 * c + 1, 1, 1).times(count * weight.rows)
    if widths.casts and weight.name.endswith(anatomy.family.kept_in_fp32 or ("\0",)):
        # transformers takes what T5's last product reads to fp32, and autocast takes it back; it is dropped out before.
        total += Moved(2 * CAST_BYTES + 2 * c + 1, 2 * CAST_BYTES + 2 * c + 1, 3, 3).times(count * weight.columns)
    if weight.kind == "experts" and weight.reads == "normed":
        # Tokens are copied to their experts and back, once for each expert that they pass.
        total += Moved(2 * c, 3 * c, 4, 6).times(
            count * weight.columns * weight.active, 2 * separate_copies(weight, request)
        )
    return total


def separate_copies(weight: ModuleWeight, request: Request) -> int:
    """Number of kernels that a module of experts takes: stacked ones are worked on together."""
    return weight.copies if request.separate_experts else 1


def _activation(
    anatomy: Anatomy, segment: Segment, request: Request, widths: Widths, tokens: Mapping[Over, int]
) -> Moved:
    """The nonlinearity between the products of an MLP, with the product of gate and value where it has them."""
    wide = [
        o for o in segment.operations if isinstance(o, ModuleWeight) and o.part in ("mlp", "experts") and o.is_matmul
    ]
    if len(wide) < 2:
        return Moved()
    down = wide[-1]
    gated = len(wide) > 2 or wide[0].rows == 2 * down.columns
    c = widths.compute
    elements = tokens[down.over] * down.columns * max(1, down.active)
    kernels = separate_copies(down, request)
    if gated:
        return Moved(5 * c, 9 * c, 2, 3).times(elements, kernels)
    if anatomy.family.activation == "new_gelu":
        # Eight operators in a row. Autocast takes the power to fp32, and there it stays until the next product.
        to_fp32 = request.autocast and c == 2
        return (Moved(76, 118, 10, 18) if to_fp32 else Moved(18 * c, 28 * c, 8, 13)).times(elements)
    return Moved(2 * c, 3 * c, 1, 1).times(elements, kernels)


def eager_scores(
    attention: Attention, widths: Widths, request: Request, samples: int, lengths: tuple[int, int], *, dropout: bool
) -> Moved:
    """Attention that keeps its scores: scaled, masked, softmax, dropout, each a kernel over all pairs of tokens.

    transformers computes the softmax in fp32. Heads are copied behind each other before the products and after them.
    """
    c = widths.compute
    queries, keys = lengths
    per_pair = Moved(6 * c, 5 * c, 3, 2)
    if request.recipe == "transformers" and c == 2:
        per_pair += Moved(CAST_BYTES, 2 * CAST_BYTES, 1, 1)
    if dropout:
        per_pair += Moved(2 * c + 1, 2 * c + 1, 1, 1)
    copied = Moved(2 * c, 2 * c, 1, 1).times(samples * attention.heads * attention.head_dim * 2 * (queries + keys), 4)
    return per_pair.times(samples * attention.heads * queries * keys) + copied


def masked_scores(attention: Attention, widths: Widths, samples: int, lengths: tuple[int, int], *, bias: bool) -> Moved:
    """What stands around a fused kernel with a mask: bools become numbers; T5 adds a bias for each head besides.

    That bias is cast, copied and masked in fp32, and its gradient summed over the samples.
    """
    queries, keys = lengths
    c, pairs = widths.compute, queries * keys
    if bias:
        return Moved(22, 18, 9, 7).times(attention.heads * pairs) + Moved(0, c).times(samples * attention.heads * pairs)
    return Moved(4 + 3 * c, 0, 3, 0).times(samples * pairs)


def adapted(adapter: Adapter, widths: Widths, request: Request, count: int) -> Moved:
    """What peft does around one adapter: input to the adapter's dtype, dropout, scaling, sum with the base's output."""
    c, a = widths.compute, widths.trained
    if "lora" in request.fused_kernels:
        return Moved(2 * c, 3 * c, 2, 4).times(count * adapter.rows)
    into = Moved()
    own = Moved()
    if a > c and request.autocast:  # of both matrices
        own = Moved(CAST_BYTES, CAST_BYTES, 2, 2).times(adapter.parameter_count)
    if a > c and not (request.autocast and request.method.type == "qlora"):
        into += Moved(c + a, c + a, 1, 1)
        if request.autocast:
            into += Moved(a + c, a + c, 1, 1)
    if request.method.dropout:
        into += Moved(2 * a + 1, 2 * a + 1, 1, 1)
    into += Moved(0, 3 * c, 0, 1)  # the gradient of the input is added to that of the base
    out = c if request.autocast else a
    back = out + c if out > c else 0
    outwards = Moved(2 * out + c + 2 * out + back, 2 * out + back, 2 + bool(back), 1 + bool(back))
    if request.method.type == "qlora":  # the result of packed weights is copied before it is added to
        outwards += Moved(2 * c, 0, 1, 0)
    return own + into.times(count * adapter.columns) + outwards.times(count * adapter.rows)


def loss(request: Request, widths: Widths, rows: float, classes: int) -> Moved:
    """Cross-entropy of `rows` positions over `classes` logits: to fp32, shifted copy, log-softmax, and the way back.

    The workers take out the rows that are learned, and put their gradients back among zeros.
    """
    c = widths.compute
    if {"loss", "output_loss"} & set(request.fused_kernels):
        return Moved(c + 4, c + 4 + c, 2, 2).times(rows * classes)
    shifted = 8 if request.recipe == "transformers" else 0
    to_fp32 = c + 4 if c == 2 else 0
    taken = Moved() if request.recipe == "transformers" else Moved(2 * c, 7 * c, 3, 9)
    # A row that shared memory cannot hold is read again for its sum and for its result, and on the way back for its sum
    # (aten/src/ATen/native/cuda/SoftMax.cu).
    again = Moved(8, 4) if classes > SOFTMAX_ROW else Moved()
    return (Moved(to_fp32 + shifted + 8, 16 + shifted + to_fp32, 4, 5) + taken + again).times(rows * classes)

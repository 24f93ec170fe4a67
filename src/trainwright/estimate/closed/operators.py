"""Operators of torch as far as memory goes: what they allocate, what their nodes keep, what their backward allocates.

Formulas of backward passes: tools/autograd/derivatives.yaml and torch/csrc/autograd/FunctionsManual.cpp of torch 2.13.
A node keeps what its formula reads and no more, and only for inputs that need a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.estimate.closed.tape import FP32, Size, Tape, Tensor


def to(tape: Tape, x: Tensor, dtype: int) -> Tensor:
    """`Tensor.to`: nothing at all when the dtype is right."""
    if x.dtype == dtype:
        return x
    out = tape.new(x.elements, dtype)
    out.headed = x.headed
    if not tape.needs_gradient(x):
        return out
    elements, own = x.elements, x.dtype
    return tape.link(out, [x], lambda g: (tape.new(elements, own),))


def cast(tape: Tape, x: Tensor, dtype: int) -> Tensor:
    """Autocast's cast: of a trained fp32 weight once, kept until autocast ends."""
    if x.dtype == dtype:
        return x
    weight = x.weight
    if weight is None or not weight.trained or dtype == FP32:
        return to(tape, x, dtype)
    cached = tape.casts.get(weight)
    if cached is None:
        cached = to(tape, x, dtype)
        assert cached.storage is not None
        tape.parts[cached.storage.key] = "weight casts"
        tape.casts[weight] = cached
    return cached


def lower(tape: Tape, x: Tensor) -> Tensor:
    """What autocast does to an input of a product."""
    return x if tape.autocast is None else cast(tape, x, tape.autocast)


def upper(tape: Tape, x: Tensor) -> Tensor:
    """What autocast does to an input of an operator that it runs in fp32."""
    return x if tape.autocast is None else cast(tape, x, FP32)


def view(x: Tensor) -> Tensor:
    """Another look at the same memory (transposed, reshaped); it has no node of its own here."""
    return Tensor(x.storage, x.elements, x.dtype, x.node)


def reshaped(tape: Tape, x: Tensor) -> Tensor:
    """`view` or `reshape` without a copy, whose gradient is a view too: the engine adds nothing into it in place."""
    out = view(x)
    if not tape.needs_gradient(x):
        return out

    def backward(g: Tensor) -> tuple[Tensor]:
        looked_at = view(g)
        looked_at.view = True
        return (looked_at,)

    return tape.link(out, [x], backward)


def part_of(tape: Tape, x: Tensor, elements: Size, *, chunk: bool = False) -> Tensor:
    """A slice; its gradient is written into zeros of the full size. `chunk`: one of a split, see `split`."""
    out = Tensor(x.storage, elements, x.dtype, dense=False)
    if not tape.needs_gradient(x):
        return out
    full, dtype = x.elements, x.dtype
    return tape.link(out, [x], lambda g: (tape.new(full, dtype),))


def copy(tape: Tape, x: Tensor, elements: Size | None = None) -> Tensor:
    """`clone`, `contiguous`, or `expand` and `reshape` to more elements, whose gradient is summed."""
    out = tape.new(elements if elements is not None else x.elements, x.dtype)
    if not tape.needs_gradient(x):
        return out
    own, dtype, same = x.elements, x.dtype, elements is None
    return tape.link(out, [x], lambda g: (g if same else tape.new(own, dtype),))


def expanded(tape: Tape, x: Tensor, elements: Size) -> Tensor:
    """`expand`: no memory; the gradient is summed."""
    out = Tensor(x.storage, elements, x.dtype, dense=False)
    if not tape.needs_gradient(x):
        return out
    own, dtype = x.elements, x.dtype
    return tape.link(out, [x], lambda g: (tape.new(own, dtype),))


def masked(tape: Tape, x: Tensor, mask: Tensor, elements: Size) -> Tensor:
    """`where` or `masked_fill` with a number; the gradient is masked likewise."""
    if not tape.needs_gradient(x):
        return tape.new(elements, x.dtype)
    kept = tape.keep(mask)
    out = tape.new(elements, x.dtype)
    dtype = x.dtype

    def backward(g: Tensor) -> tuple[Tensor]:
        held = kept.unpack()
        result = tape.new(elements, dtype)
        del held
        return (result,)

    return tape.link(out, [x], backward)


def add(tape: Tape, a: Tensor, b: Tensor, *, part: str | None = None) -> Tensor:
    """A sum; the gradient goes to both as it is."""
    elements = a.elements if abs(a.elements) >= abs(b.elements) else b.elements
    out = tape.new(elements, max(a.dtype, b.dtype), part)
    if not tape.needs_gradient(a, b):
        return out
    return tape.link(out, [a, b], lambda g: (g, g))


def mul(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """A product of elements; each gradient needs the other factor."""
    elements = a.elements if abs(a.elements) >= abs(b.elements) else b.elements
    dtype = max(a.dtype, b.dtype)
    if not tape.needs_gradient(a, b):
        return tape.new(elements, dtype)
    for_a, for_b = a.node is not None, b.node is not None
    kept = tape.keep(b if for_a else None, a if for_b else None)
    out = tape.new(elements, dtype)

    def backward(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        held = kept.unpack()
        second = tape.new(elements, dtype) if for_b else None
        first = tape.new(elements, dtype) if for_a else None
        del held
        return first, second

    return tape.link(out, [a, b], backward)


def scale(tape: Tape, x: Tensor, *, part: str | None = None) -> Tensor:
    """A product with a number, a negation: nothing is kept."""
    out = tape.new(x.elements, x.dtype, part)
    if not tape.needs_gradient(x):
        return out
    elements, own = x.elements, x.dtype
    return tape.link(out, [x], lambda g: (tape.new(elements, own, part),))


def shift(tape: Tape, x: Tensor) -> Tensor:
    """A sum with a number: the gradient passes."""
    out = tape.new(x.elements, x.dtype)
    return tape.link(out, [x], lambda g: (g,)) if tape.needs_gradient(x) else out


def elementwise(
    tape: Tape, x: Tensor, *, temporaries: int = 0, keep_output: bool = False, part: str | None = None
) -> Tensor:
    """A function of each element that keeps its input or its result; `temporaries` of the backward are of its size."""
    own, elements = x.dtype, x.elements
    if not tape.needs_gradient(x):
        return tape.new(elements, own, part)
    if keep_output:
        out = tape.new(elements, own, part)
        kept = tape.keep(out)
    else:
        kept = tape.keep(x)
        out = tape.new(elements, own, part)

    def backward(g: Tensor) -> tuple[Tensor]:
        held = kept.unpack()
        inner = [tape.new(elements, own, part) for _ in range(temporaries)]
        result = tape.new(elements, own, part)
        del inner, held
        return (result,)

    return tape.link(out, [x], backward)


def power(tape: Tape, x: Tensor) -> Tensor:
    """`pow`, in fp32 under autocast: its backward makes the next lower power and twice that before the product."""
    x = upper(tape, x)
    if not tape.needs_gradient(x):
        return tape.new(x.elements, x.dtype)
    elements, dtype = x.elements, x.dtype
    kept = tape.keep(x)
    out = tape.new(elements, dtype)

    def backward(g: Tensor) -> tuple[Tensor]:
        held = kept.unpack()
        lower_power = tape.new(elements, dtype)
        twice = tape.new(elements, dtype)
        result = tape.new(elements, dtype)
        del twice, lower_power, held
        return (result,)

    return tape.link(out, [x], backward)


def mean(tape: Tape, x: Tensor, rows: Size) -> Tensor:
    """The mean over the last dimension; its gradient is spread over all elements before it is divided."""
    out = tape.new(rows, x.dtype)
    if not tape.needs_gradient(x):
        return out
    elements, dtype = x.elements, x.dtype
    return tape.link(out, [x], lambda g: (tape.new(elements, dtype),))


def product(tape: Tape, x: Tensor, weight: Tensor, rows: int, columns: int, bias: Tensor | None = None) -> Tensor:
    """`linear`: x of (tokens, columns) with a weight of (rows, columns); autocast casts its last argument first."""
    bias = lower(tape, bias) if bias is not None else None
    weight = lower(tape, weight)
    x = lower(tape, x)
    tokens = x.elements / columns
    if not tape.needs_gradient(x, weight, bias):
        out = tape.new(tokens * rows, x.dtype)
        tape.multiplies(backward=False)
        return out
    for_x, for_weight = x.node is not None, weight.node is not None
    first, second = weight if for_x else None, x if for_weight else None  # `mat2` and `self` of `mm`
    kept = tape.keep(first, second) if bias is None else tape.keep(second, first)  # `mat1` and `mat2` of `addmm`
    out = tape.new(tokens * rows, x.dtype)
    tape.multiplies(backward=False)
    elements, size, dtype = x.elements, weight.elements, x.dtype
    with_bias = bias is not None

    def backward(g: Tensor) -> tuple[Any, ...]:
        held = kept.unpack()
        if with_bias:
            to_x = tape.new(elements, dtype) if for_x else None
            tape.multiplies(backward=True)
            to_weight = tape.new(size, dtype) if for_weight else None
        else:
            to_weight = tape.new(size, dtype) if for_weight else None
            if for_weight:
                tape.multiplies(backward=True)
            to_x = tape.new(elements, dtype) if for_x else None
            tape.multiplies(backward=True)
        for gradient in (to_x, to_weight):
            if gradient is not None:
                gradient.view = True  # products are made of rows, and for the transposed weight
        del held
        return to_x, to_weight, g if with_bias else None

    return tape.link(out, [x, weight, bias], backward)


def multiply(tape: Tape, a: Tensor, b: Tensor, elements: Size) -> Tensor:
    """`matmul` of two activations, batch by batch."""
    b = lower(tape, b)
    a = lower(tape, a)
    if not tape.needs_gradient(a, b):
        return tape.new(elements, a.dtype)
    for_a, for_b = a.node is not None, b.node is not None
    kept = tape.keep(b if for_a else None, a if for_b else None)
    out = tape.new(elements, a.dtype)
    of_a, of_b, dtype = a.elements, b.elements, a.dtype

    def backward(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        held = kept.unpack()
        second = tape.new(of_b, dtype) if for_b else None
        first = tape.new(of_a, dtype) if for_a else None
        del held
        return first, second

    return tape.link(out, [a, b], backward)


def softmax(tape: Tape, x: Tensor, *, to_fp32: bool) -> Tensor:
    """`softmax`, in fp32 under autocast; its result is kept. `to_fp32`: dtype=float32, cast as the kernel reads."""
    x = upper(tape, x)
    dtype = FP32 if to_fp32 else x.dtype
    out = tape.new(x.elements, dtype)
    if not tape.needs_gradient(x):
        return out
    kept = tape.keep(out)
    elements, own = x.elements, x.dtype

    def backward(g: Tensor) -> tuple[Tensor]:
        held = kept.unpack()
        result = tape.new(elements, own)
        product = tape.new(elements, dtype, "kernel temporaries")
        del held, product
        return (result,)

    return tape.link(out, [x], backward)


def dropout(tape: Tape, x: Tensor, p: float, *, training: bool) -> Tensor:
    """`native_dropout`: a mask of one byte an element is kept; it is made first (native/cuda/Dropout.cu)."""
    if not training or p == 0:
        return x
    mask = tape.new(x.elements, 1)
    out = tape.new(x.elements, x.dtype)
    if not tape.needs_gradient(x):
        return out
    kept = tape.keep(mask)
    elements, dtype = x.elements, x.dtype

    def backward(g: Tensor) -> tuple[Tensor]:
        held = kept.unpack()
        result = tape.new(elements, dtype)
        del held
        return (result,)

    return tape.link(out, [x], backward)


def layer_norm(tape: Tape, x: Tensor, scale_by: Tensor, shift_by: Tensor | None, columns: int) -> Tensor:
    """`native_layer_norm`, in fp32 under autocast; mean and deviation of each row are kept in fp32."""
    shift_by = upper(tape, shift_by) if shift_by is not None else None  # arguments of C++: the last one first
    scale_by = upper(tape, scale_by)
    given = upper(tape, x)
    rows = given.elements / columns
    if not tape.needs_gradient(given, scale_by, shift_by):
        out = tape.new(given.elements, given.dtype)
        tape.passing(rows * FP32, rows * FP32, part="temporaries")
        return out
    out = tape.new(given.elements, given.dtype)
    means, deviations = tape.new(rows, FP32), tape.new(rows, FP32)
    kept = tape.keep(given, scale_by, means, deviations)
    del means, deviations
    elements, dtype, for_x = given.elements, given.dtype, given.node is not None
    for_scale = scale_by.node is not None
    for_shift = shift_by is not None and shift_by.node is not None

    def backward(g: Tensor) -> tuple[Any, ...]:
        held = kept.unpack()
        results = (
            tape.new(elements, dtype) if for_x else None,
            tape.new(complex(columns), dtype) if for_scale else None,
            tape.new(complex(columns), dtype) if for_shift else None,
        )
        del held
        return results

    return tape.link(out, [given, scale_by, shift_by], backward)


def embedding(
    tape: Tape, weight: Tensor, ids: Size, columns: int, *, sorted_above: bool, indices: Tensor | None = None
) -> Tensor:
    """Vectors of a table; its gradient is a whole table. `indices`: those that nobody else keeps."""
    out = tape.new(ids * columns, weight.dtype)
    if not tape.needs_gradient(weight):
        return out
    size, dtype = weight.elements, weight.dtype
    kept = tape.keep(indices) if indices is not None else None

    def backward(g: Tensor) -> tuple[Tensor]:
        held = kept.unpack() if kept is not None else None
        result = tape.new(size, dtype)
        if sorted_above:
            tape.passing(*[ids * 8] * 6, ids * columns * FP32)
        del held
        return (result,)

    return tape.link(out, [weight], backward)


def concatenated(tape: Tape, parts: Sequence[Tensor]) -> Tensor:
    """`cat`; the gradient of each piece is a view of the whole."""
    out = tape.new(sum((p.elements for p in parts), 0j), max(p.dtype for p in parts))
    if not tape.needs_gradient(*parts):
        return out
    sizes = [p.elements for p in parts]
    return tape.link(out, list(parts), lambda g: tuple(Tensor(g.storage, n, g.dtype, dense=False) for n in sizes))


def split(tape: Tape, x: Tensor, sizes: Sequence[Size]) -> list[Tensor]:
    """`chunk` and `split`: gradients of the pieces are joined into a new whole."""
    pieces = [Tensor(x.storage, size, x.dtype, dense=False) for size in sizes]
    if not tape.needs_gradient(x):
        return pieces
    full, dtype, count = x.elements, x.dtype, len(sizes)
    whole = tape.link(Tensor(None, full, dtype), [x], lambda g: (g,))
    waiting: list[Tensor] = []

    def backward(g: Tensor) -> tuple[Tensor | None]:
        waiting.append(g)
        if len(waiting) < count:
            return (None,)
        joined = tape.new(full, dtype)
        waiting.clear()
        return (joined,)

    return [tape.link(piece, [whole], backward) for piece in pieces]

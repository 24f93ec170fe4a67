"""The loss on logits: the workers' sum over learned positions, and transformers' mean over all."""

from __future__ import annotations

from trainwright.estimate.closed.step import StepPass
from trainwright.estimate.closed.tape import FP32, Size, Tape, Tensor

LOGITS = "logits and loss"
INDEX = 8
"""Bytes of an index."""


def workers_loss(step: StepPass, logits: Tensor, rows: Size, vocabulary: int, *, shifted: bool) -> Tensor:
    """train/tasks/token_loss.py: only learned positions become fp32; `rows` are those of which logits exist."""
    tape = step.tape
    used = rows
    if shifted:
        length = step.asked.target_length
        used = rows / length * (length - 1)
        logits = sliced(tape, logits, used * vocabulary)
    learned = used * step.asked.learned_share
    chosen = to_fp32(tape, indexed(tape, logits, learned * vocabulary, used * vocabulary, learned, 2))
    del logits
    labels = tape.new(learned, INDEX)
    return cross_entropy(tape, chosen, labels, learned, vocabulary)


def transformers_loss(step: StepPass, logits: Tensor, rows: Size, *, upcast: bool) -> Tensor:
    """transformers' loss/loss_utils.py, and accelerate's turning of all outputs into fp32 behind autocast.

    `upcast`: of causal models, whose logits become fp32 first; others leave it to the loss.
    """
    tape = step.tape
    vocabulary = round(logits.elements.imag / rows.imag)
    chosen = to_fp32(tape, logits) if upcast else logits
    out = cross_entropy(tape, chosen, tape.new(rows, INDEX), rows, vocabulary)
    del chosen
    tape.autocast = None
    tape.casts.clear()
    if step.asked.half is not None and logits.dtype != FP32:
        tape.passing(logits.elements * FP32, part=LOGITS)
    return out


def cross_entropy(tape: Tape, chosen: Tensor, labels: Tensor, rows: Size, vocabulary: int) -> Tensor:
    """`cross_entropy`: the log of the softmax is kept by both of its nodes, under autocast in fp32 by the second."""
    elements, dtype = chosen.elements, chosen.dtype
    out = tape.new(elements, dtype, LOGITS)
    if tape.needs_gradient(chosen):
        for_softmax = tape.keep(out)

        def softmax_backward(g: Tensor) -> tuple[Tensor]:
            held = for_softmax.unpack()
            result = tape.new(elements, dtype, LOGITS)
            del held
            return (result,)

        out = tape.link(Tensor(out.storage, elements, dtype), [chosen], softmax_backward)
    if tape.autocast is not None:
        out = to_fp32(tape, out)
    losses = tape.new(rows, FP32)
    if out.node is None:
        return losses
    for_nll, wide = tape.keep(out, labels), out.dtype

    def nll_backward(g: Tensor) -> tuple[Tensor]:
        held = for_nll.unpack()
        result = tape.new(elements, wide, LOGITS)
        del held
        return (result,)

    return tape.link(losses, [out], nll_backward)


def sliced(tape: Tape, x: Tensor, elements: Size) -> Tensor:
    """A slice of logits."""
    out = Tensor(x.storage, elements, x.dtype, dense=False)
    if not tape.needs_gradient(x):
        return out
    full, dtype = x.elements, x.dtype
    return tape.link(out, [x], lambda g: (tape.new(full, dtype, LOGITS),))


def indexed(tape: Tape, x: Tensor, elements: Size, full: Size, rows: Size, dims: int) -> Tensor:
    """`x[mask]`: places of the mask, then a copy of what is there; backward puts it into zeros."""
    places = tape.new(rows * dims, INDEX)
    kept = tape.keep(places) if tape.needs_gradient(x) else None
    out = tape.new(elements, x.dtype, LOGITS)
    del places
    if kept is None:
        return out
    dtype = x.dtype

    def backward(g: Tensor) -> tuple[Tensor]:
        held = kept.unpack()
        zeros = tape.new(full, dtype, LOGITS)
        tape.passing(*[rows * INDEX] * 4)
        del held
        return (zeros,)

    return tape.link(out, [x], backward)


def to_fp32(tape: Tape, x: Tensor) -> Tensor:
    """Logits in fp32."""
    if x.dtype == FP32:
        return x
    elements, dtype = x.elements, x.dtype
    out = tape.new(elements, FP32, LOGITS)
    if not tape.needs_gradient(x):
        return out
    return tape.link(out, [x], lambda g: (tape.new(elements, dtype, LOGITS),))

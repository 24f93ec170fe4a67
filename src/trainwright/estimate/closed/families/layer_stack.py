"""Layers one after the other, checkpointed if asked for, and the marks that cut the step into stretches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from trainwright.estimate.closed import operators as op
from trainwright.estimate.closed.loss import LOGITS
from trainwright.estimate.closed.sharding import Unit
from trainwright.estimate.closed.step import SAMPLES, Layer, Shared, StepPass
from trainwright.estimate.closed.tape import FP32, Leaf, Size, Tape, Tensor

OneLayer = Callable[[StepPass, Layer, Tensor, Shared], Tensor]


@dataclass(slots=True)
class Stage:
    """A layer of the model that is passed, and how many of the real one it stands for.

    Layers of several kinds that alternate are one `group`; `stack` 0 is the encoder where there is one.
    """

    layer: Layer
    repeats: int
    group: int | None
    stack: int
    unit: Unit | None = None


@dataclass(slots=True)
class Model:
    """A model with all its layers, or one of each kind; `outside` is what stands before, between and after them.

    `aside` is what text never passes, such as a vision tower's embeddings. `root` is the unit of all but the layers.
    """

    outside: list[Layer]
    stages: list[Stage]
    aside: list[Layer]
    root: Unit | None = None


def through(
    step: StepPass, stages: list[Stage], layer: OneLayer, hidden: Tensor, shared: Shared, first: int = 0
) -> Tensor:
    """Pass the layers, each checkpointed if asked for."""
    tape = step.tape
    for number, stage in enumerate(stages, start=first):
        tape.mark(f"forward {number}")

        given = replace(shared, rope=shared.rope_of(stage.layer), window_rope=None)

        def one(x: Tensor, inner: Layer = stage.layer, given: Shared = given) -> Tensor:
            try:
                return layer(step, inner, x, given)
            finally:
                step.attention_weights = None

        if step.sharding is not None and given.rope is not None:
            cos, sin = given.rope
            given.rope = op.to(tape, cos, step.asked.weight_dtype), op.to(tape, sin, step.asked.weight_dtype)
            del cos, sin
        if step.sharding is not None and given.memory is not None:
            # FSDP2 casts and watches all that a unit is given: the gradients of keys and values meet there, and tell
            # that a unit is done where nothing is learned before it.
            done = None if tape.needs_gradient(hidden) else _done(step, stage)
            given.memory = boundary(step, op.to(tape, given.memory, step.asked.weight_dtype), None, done)
        hidden = _sharded(step, stage, one, hidden, f"backward {number}")
        shared.lingering, given.lingering = given.lingering, None
        for name in ("bias", "cross_bias"):
            made = getattr(given, name)
            if getattr(shared, name) is None and made is not None:
                # The layer that makes them for the others does not hold them for its own backward pass.
                setattr(shared, name, made)
                setattr(given, name, None)
                tape.lasting.add(made.storage.key)
    return hidden


def _sharded(step: StepPass, stage: Stage, one: Callable[[Tensor], Tensor], hidden: Tensor, name: str) -> Tensor:
    """One layer with what FSDP2 does around it; `name` is the stretch that its backward pass begins."""
    sharding, unit = step.sharding, stage.unit
    if sharding is None or unit is None:
        return boundary(step, _checkpointed(step, one, hidden), name)
    hidden = op.to(step.tape, hidden, step.asked.weight_dtype)  # `cast_forward_inputs`
    sharding.before_forward(unit)
    hidden = boundary(step, hidden, None, _done(step, stage))
    hidden = _checkpointed(step, one, hidden)
    sharding.after_forward(unit)
    return boundary(step, hidden, name, lambda: sharding.before_backward(unit))


def _done(step: StepPass, stage: Stage) -> Callable[[], None]:
    sharding, unit = step.sharding, stage.unit
    assert sharding is not None and unit is not None
    return partial(sharding.after_backward, unit)


def _checkpointed(step: StepPass, one: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    asked, tape = step.asked, step.tape
    if asked.checkpointing == "none" or not step.training:
        return one(hidden)
    return (tape.checkpoint_reentrant if asked.checkpointing == "reentrant" else tape.checkpoint)(one, hidden)


def begin(step: StepPass, model: Model) -> None:
    """The root's forward begins: what no layer holds is gathered."""
    step.tape.mark("embedding")
    if step.sharding is not None and model.root is not None:
        step.sharding.before_forward(model.root)


def end(step: StepPass, model: Model, logits: Tensor) -> Tensor:
    """The root's forward is over."""
    sharding, root = step.sharding, model.root
    if sharding is None or root is None:
        return logits
    sharding.after_forward(root)
    sharding.finish_forward()
    return boundary(step, logits, None, lambda: sharding.before_backward(root))


def boundary(step: StepPass, hidden: Tensor, name: str | None, then: Callable[[], None] | None = None) -> Tensor:
    """Where the backward pass comes by: begin a stretch of that name, then do what is asked."""
    tape = step.tape
    if not tape.needs_gradient(hidden):
        return hidden
    out = tape.link(Tensor(hidden.storage, hidden.elements, hidden.dtype), [hidden], lambda g: (g,))
    assert out.node is not None

    def passed() -> None:
        if name is not None:
            tape.mark(name)
        if then is not None:
            then()

    out.node.hook = passed
    return out


def demanded(step: StepPass, embedded: Tensor) -> Tensor:
    """`enable_input_require_grads`, which transformers 5 calls with checkpointing, whatever is trained."""
    if step.asked.checkpointing == "none" or not step.training or embedded.node is not None:
        return embedded
    return Tensor(embedded.storage, embedded.elements, embedded.dtype, Leaf(embedded.storage))


def as_logits(step: StepPass, logits: Tensor) -> Tensor:
    """Call them by their part."""
    assert logits.storage is not None
    step.tape.parts[logits.storage.key] = LOGITS
    return logits


def make_masks(step: StepPass, model: Model, dtype: int) -> Shared:
    """transformers' masking_utils.py: none where torch's own causal attention does, else one byte for each pair.

    The eager attention always needs one, of numbers in the dtype of the embeddings.
    """
    asked = step.asked
    windows = {a.window for stage in model.stages for a in stage.layer.attentions}
    eager = asked.attention == "eager"
    masked = asked.batch != "full" or eager
    shared = Shared()
    if masked and (None in windows or asked.family.makes_both_masks):
        shared.mask = _mask(step, dtype if eager else None)
    for window in windows - {None}:
        assert window is not None
        if masked or asked.length >= window:
            shared.window_mask = _mask(step, dtype if eager else None, window=True)
    return shared


def _mask(step: StepPass, dtype: int | None, *, window: bool = False) -> Tensor:
    """`and_masks` of what a mask consists of: documents that are packed, a window, causality, padding."""
    tape, packed, one = step.tape, step.asked.batch == "packed", complex(step.asked.length**2)
    each = SAMPLES * one if packed else one
    if packed:
        apart = tape.new(each, 1)
        documents = tape.new(each, 1)
        del apart
        inner = _causal(tape, each, window=window)
        mask = tape.new(each, 1)
        del inner, documents
    else:
        inner = _causal(tape, each, window=window)
        first = tape.new(each, 1)
        del inner
        mask = tape.new(SAMPLES * one, 1)
        del first
    if dtype is None:
        return mask
    pairs = mask.elements
    numbers = tape.new(pairs, dtype)
    del mask
    return tape.new(pairs, 1) if step.asked.family.mask_of_bools else numbers


def _causal(tape: Tape, pairs: Size, *, window: bool) -> Tensor:
    """Which keys come before a query, and within its window where it has one."""
    if not window:
        return tape.new(pairs, 1)
    near = tape.new(pairs, 1)
    within = tape.new(pairs, 1)
    del near
    earlier = tape.new(pairs, 1)
    both = tape.new(pairs, 1)
    del earlier, within
    return both


def pair_mask(step: StepPass, queries: int, keys: int) -> Tensor:
    """The mask of attention without causality: one byte for each pair."""
    return step.tape.new(SAMPLES * (queries * keys), 1)


def rotary(step: StepPass, dims: int, dtype: int) -> tuple[Tensor, Tensor]:
    """`LlamaRotaryEmbedding`: tables for one row of positions, or for each row where samples are packed."""
    tape, asked = step.tape, step.asked
    positions = SAMPLES * asked.length if asked.batch == "packed" else complex(asked.length)
    frequencies = tape.new(positions * (dims / 2), FP32)
    angles = tape.new(positions * dims, FP32)
    cos = op.scale(tape, tape.new(positions * dims, FP32))
    sin = op.scale(tape, tape.new(positions * dims, FP32))
    tables = op.to(tape, cos, dtype), op.to(tape, sin, dtype)
    del frequencies, angles
    return tables

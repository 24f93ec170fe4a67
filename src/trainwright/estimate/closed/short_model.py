"""A short model that stands for the full one, or the full one: its pass, and the course that follows from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from trainwright.anatomy.family import Family
from trainwright.anatomy.parts import Anatomy, ModuleWeight, Segment
from trainwright.estimate.closed.families import forward_of
from trainwright.estimate.closed.families.layer_stack import Model, Stage
from trainwright.estimate.closed.memory_timeline import TURNING, MemoryPoint, whole_course
from trainwright.estimate.closed.modules import Module
from trainwright.estimate.closed.parameter_memory import Parameters, elements
from trainwright.estimate.closed.sharding import Accumulated, Sharding, Unit
from trainwright.estimate.closed.step import BYTES, Layer, StepKey, StepPass, build_layer
from trainwright.estimate.closed.tape import (
    HALF,
    Recording,
    Tape,
    hand_over_gradient,
    leave_gradient,
    take_passing_gradient,
)
from trainwright.estimate.closed.zero import Buckets

FP64 = 8
Chosen = Callable[[Sequence[Segment]], list[tuple[Segment, int, bool]]]
"""Layers of a stack, how many of it each stands for, and whether it is one of those in the middle."""


def micro_step(anatomy: Anatomy, asked: StepKey, found: Parameters) -> tuple[MemoryPoint, ...]:
    """Run one micro-step of a short model; return the points that can be the highest, static memory left out."""
    model = shorten(anatomy, asked, found)
    step = _passed(asked, model, elements(found.trained))
    repeats: dict[str, int] = {}
    groups: dict[str, int] = {}
    for number, stage in enumerate(model.stages):
        for name in (f"forward {number}", f"backward {number}"):
            repeats[name] = stage.repeats
            if stage.group is not None:
                groups[name] = stage.group
    return whole_course(step.tape, repeats, groups)


def whole_micro_step(anatomy: Anatomy, asked: StepKey, found: Parameters) -> Recording:
    """Run one micro-step, or an evaluation pass, of all layers."""
    model = _built(anatomy, asked, found, lambda stack: [(segment, 1, False) for segment in stack])
    step = _passed(asked, model, elements(found.trained))
    return step.tape.recording()


def _passed(asked: StepKey, model: Model, trained: int) -> StepPass:
    """Pass the model with what the strategy does around it; the result holds what outlives the pass.

    `trained`: numbers that are trained in the model of which this one may be a part.
    """
    tape = Tape(asked.half)
    step = StepPass(tape, asked)
    buckets = None
    if asked.strategy == "fsdp2":
        tape.accumulate = take_passing_gradient
        step.sharding = _shard(tape, asked, model)
    elif asked.strategy.startswith("zero"):
        element, accumulating = BYTES[asked.precision], asked.accumulating
        buckets = Buckets(tape, asked.strategy, element, asked.kept_bytes, trained, accumulating=accumulating)
        tape.accumulate = buckets.take
    elif asked.strategy == "ddp" and asked.recipe == "trainwright":
        tape.accumulate = hand_over_gradient if asked.accumulating else leave_gradient
    elif asked.accumulating:
        tape.accumulate = leave_gradient
    _pass(step, model)
    if asked.training and buckets is not None:
        buckets.finish()
    return step


def _pass(step: StepPass, model: Model) -> None:
    """Forward, and backward where it trains; autocast ends in between, and drops its casts."""
    tape, forward = step.tape, forward_of(step.asked.family)
    tape.autocast = step.asked.half
    if not step.training:
        with tape.without_gradient():
            forward(step, model)
        return
    loss = forward(step, model)
    tape.autocast = None
    tape.casts.clear()
    tape.mark(TURNING)
    assert loss.node is not None
    root, gradient = loss.node, tape.new(loss.elements, FP64)
    del loss
    tape.run_backward(root, gradient)
    if step.sharding is not None:
        step.sharding.finish_backward()  # the engine's last callback; what the graph holds goes with the loss


def _shard(tape: Tape, asked: StepKey, model: Model) -> Sharding:
    """One unit for each layer, and one for the rest, which stays gathered (train/strategies/fsdp2.py)."""
    policy = HALF if asked.precision != "fp32" and asked.autocast else None
    for stage in model.stages:
        registered = _as_registered(stage.layer, asked.family)
        weights = [weight for module in registered for weight in module.parameters()]
        stage.unit = Unit(weights, asked.ranks, policy, reshards=asked.reshards)
    rest = [weight for layer in (*model.outside, *model.aside) for weight in layer.parameters()]
    model.root = Unit(rest, asked.ranks, policy, reshards=False)
    there: Accumulated = "nothing"
    if asked.accumulating:
        there = "shards" if asked.sync_each else "whole"
    return Sharding(tape, asked.ranks, there, synchronizes=asked.synchronizes)


def _as_registered(layer: Layer, family: Family) -> list[Module]:
    """Modules of a layer in transformers' order, which a unit keeps: most families register their norms last."""
    modules = list(layer.modules.values())
    return modules if family.norms_registered_first else sorted(modules, key=lambda module: module.rows == 1)


def shorten(anatomy: Anatomy, asked: StepKey, found: Parameters) -> Model:
    """Keep the first and the last layer of each stack and one of each kind between; the rest is built whole."""
    return _built(anatomy, asked, found, _exemplars)


def _built(anatomy: Anatomy, asked: StepKey, found: Parameters, chosen: Chosen) -> Model:
    shared: dict[str, Module] = {}
    outside: list[Layer] = []
    aside: list[Layer] = []
    stages: list[Stage] = []
    stacks = 0
    for is_stack, run in groupby(anatomy.segments, key=lambda s: s.is_layer and not _never_passed(s)):
        segments = list(run)
        if is_stack:
            for segment, repeats, in_middle in chosen(segments):
                layer = build_layer(segment, asked, found, shared)
                stages.append(Stage(layer, repeats, stacks if in_middle else None, stacks))
            stacks += 1
            continue
        for segment in segments:
            if not _never_passed(segment):
                outside.append(build_layer(segment, asked, found, shared))
            elif not segment.is_layer:
                aside.append(build_layer(segment, asked, found, shared))
    return Model(outside, stages, aside)


def _exemplars(stack: Sequence[Segment]) -> list[tuple[Segment, int, bool]]:
    if len(stack) <= 2:
        return [(segment, 1, False) for segment in stack]
    counts = Counter(id(segment.operations) for segment in stack[1:-1])
    one_of = {id(segment.operations): segment for segment in stack[1:-1]}
    middle = [(one_of[kind], count, True) for kind, count in counts.items()]
    return [(stack[0], 1, False), *middle, (stack[-1], 1, False)]


def _never_passed(segment: Segment) -> bool:
    weights = [operation for operation in segment.operations if isinstance(operation, ModuleWeight)]
    return bool(weights) and all(weight.over == "nothing" for weight in weights)

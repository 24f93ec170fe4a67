"""A layout by rule held to traced steps: for a model that transformers builds and nothing here describes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.errors import ExitCode, UserError
from trainwright.estimate.calibration import Basis
from trainwright.estimate.cuda_overhead import outside_bytes
from trainwright.estimate.figures import Memory
from trainwright.estimate.measured_runs import gpu_model, kind_of
from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device
from trainwright.hardware.reading import GIB
from trainwright.job.schema import Job
from trainwright.plan.capacity import MARGIN
from trainwright.plan.confirmed import MICRO_STEPS, Tracing
from trainwright.plan.estimates import Cards, Estimate, request_of, why_too_big
from trainwright.plan.job_model import NoEstimate
from trainwright.plan.layout import Layout
from trainwright.plan.least import Unestimated
from trainwright.plan.search import EVAL_FACTOR


@dataclass(frozen=True)
class TracedRule:
    """A layout by rule, its memory where it was traced, and what came of each trace."""

    chosen: Unestimated
    estimate: Estimate | None
    traces: tuple[str, ...]


@dataclass(frozen=True)
class _Traces:
    """Traced steps of one way to share the work, and sentences of what came of each, and of each before.

    Under DDP one rank alone is traced, which two short models tell, and all gradients in buckets are added: more than
    DDP takes by what of them is in the highest point already.
    """

    job: Job
    config: dict[str, object]
    devices: tuple[Device, ...]
    tracing: Tracing
    way: Unestimated
    sentences: list[str]

    def of(self, layout: Layout) -> Estimate:
        """Trace a step.

        Raises:
            UserError: it cannot be traced.
        """
        cards = Cards.of(self.devices)
        estimate = _estimate(self.job, self._memory(layout, cards), layout, cards, self.devices)
        too_big = why_too_big(estimate.peak_bytes, cards.capacity)
        batch = f"{layout.micro_batch_size} x {layout.gradient_accumulation_steps}"
        traced = f"{layout.strategy}, {batch}: traced, {estimate.peak_bytes / GIB:.1f} GiB"
        self.sentences.append(traced if too_big is None else f"{traced}: {too_big}")
        return estimate

    def _memory(self, layout: Layout, cards: Cards) -> Memory:
        request = request_of(self.job, self.config, layout, self.devices)
        steps = min(request.gradient_accumulation_steps, MICRO_STEPS)
        asked = dataclasses.replace(request, gradient_accumulation_steps=steps)
        if layout.strategy != "ddp":
            short = layout.strategy in ("single", "fsdp2")
            return self.tracing.memory(dataclasses.replace(asked, two_depths=short), cards.tightest)
        on_one = dataclasses.replace(asked, strategy="single", world_size=1, two_depths=True)
        alone = self.tracing.memory(on_one, cards.tightest)
        outside = outside_bytes(request, cards.tightest)
        buckets = 0 if self.way.least is None else self.way.least.parts_bytes.get("gradients", 0)
        reserved = alone.reserved_bytes + buckets
        evaluation = alone.evaluation_reserved_bytes
        return dataclasses.replace(
            alone,
            allocated_bytes=alone.allocated_bytes + buckets,
            reserved_bytes=reserved,
            device_bytes=reserved + sum(outside.values()),
            parts_bytes={**alone.parts_bytes, "communication": buckets},
            outside_bytes=outside,
            evaluation_reserved_bytes=None if evaluation is None else evaluation + buckets,
        )


def traced_by_rule(
    job: Job,
    model: NoEstimate,
    ways: Sequence[Unestimated],
    devices: tuple[Device, ...],
    tracing: Tracing,
    *,
    must_fit: bool,
) -> TracedRule:
    """Return the first of the layouts of which a traced step fits, with the largest micro-batch of those that do.

    Where the step of one cannot be traced, and none before it fits, it stays as it is, without an estimate.

    Raises:
        UserError: it must fit, and no traced step does (exit code 3).
    """
    assert model.config is not None
    sentences: list[str] = []
    refused = False
    free = job.train.micro_batch_size == job.train.gradient_accumulation_steps == "auto"
    for way in ways:
        if refused and way.layout.offload == "none":
            continue  # what is sharded by ZeRO alone takes no less
        traces = _Traces(job, model.config, devices, tracing, way, sentences)
        try:
            fitting = _largest(traces, way.layout) if free else _that_fits(traces, way.layout)
        except UserError as error:
            reason = "; ".join([error.message, *error.problems])
            sentences.append(f"{way.layout.strategy}: not traced: {reason}")
            return TracedRule(way, None, tuple(sentences))
        if fitting is not None:
            layout, estimate = fitting
            chosen = dataclasses.replace(way, layout=layout)
            return TracedRule(_told(chosen) if free else chosen, estimate, tuple(sentences))
        refused = way.layout.strategy == "fsdp2"
    if not must_fit:
        return TracedRule(ways[-1], None, tuple(sentences))
    raise UserError(
        "no traced step fits on these devices",
        problems=sentences,
        hints=["resources.strategy=fsdp2 shares the weights among the GPUs", "method.type=lora, or larger GPUs"],
        exit_code=ExitCode.NO_PLAN_FITS,
    )


def _that_fits(traces: _Traces, layout: Layout) -> tuple[Layout, Estimate] | None:
    estimate = traces.of(layout)
    return (layout, estimate) if _room(estimate) >= 0 else None


def _largest(traces: _Traces, layout: Layout) -> tuple[Layout, Estimate] | None:
    """Return the layout with the largest micro-batch that fits, of its own one and what halving it gives.

    Memory grows by a line with the micro-batch, at the most: two traces tell which may fit, and a third one whether.
    """
    size, whole = layout.micro_batch_size, traces.of(layout)
    if _room(whole) >= 0:
        return layout, whole
    if size == 1:
        return None
    smallest = _with_micro_batch(traces.job, layout, 1)
    fitting = _that_fits(traces, smallest)
    if fitting is None:
        return None
    each = (_room(fitting[1]) - _room(whole)) / (size - 1)
    while (size := size // 2) > 1:
        if _room(fitting[1]) - (size - 1) * each >= 0:
            found = _that_fits(traces, _with_micro_batch(traces.job, layout, size))
            if found is not None:
                return found
    return fitting


def _room(estimate: Estimate) -> float:
    """Return what a plan may still take, negative where it takes too much."""
    assert estimate.capacity is not None
    return estimate.capacity.total_bytes * (1 - MARGIN) - estimate.peak_bytes


def _with_micro_batch(job: Job, layout: Layout, size: int) -> Layout:
    smaller = layout.with_micro_batch(size)
    if job.eval.batch_size != "auto":
        return smaller
    return dataclasses.replace(smaller, eval_batch_size=EVAL_FACTOR * size)


def _told(found: Unestimated) -> Unestimated:
    layout, total = found.layout, found.layout.global_batch_size
    steps = layout.gradient_accumulation_steps
    changed = {
        "train.micro_batch_size": Choice(layout.micro_batch_size, "the largest of those traced that fits"),
        "train.gradient_accumulation_steps": Choice(
            steps, f"{total} samples / ({layout.micro_batch_size} x {layout.ranks} ranks)"
        ),
    }
    return dataclasses.replace(found, choices=found.choices | changed)


def _estimate(job: Job, memory: Memory, layout: Layout, cards: Cards, devices: tuple[Device, ...]) -> Estimate:
    kind = kind_of(
        map(gpu_model, devices), strategy=layout.strategy, method=job.method.type, precision=layout.precision
    )
    return Estimate(
        memory=memory,
        memory_basis=Basis(kind),
        first_memory=memory,
        capacity=cards.capacity,
        host=None,
        no_time="what the layers of this model compute is not described here",
    )

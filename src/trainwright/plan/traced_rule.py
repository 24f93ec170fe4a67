"""A layout by rule held to traced steps: for a model that transformers builds and nothing here describes."""

from __future__ import annotations

import dataclasses

from trainwright.errors import ExitCode, UserError
from trainwright.estimate.calibration import Basis
from trainwright.estimate.figures import Memory
from trainwright.estimate.measured_runs import gpu_model, kind_of
from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device
from trainwright.hardware.reading import GIB
from trainwright.job.schema import Job
from trainwright.plan.confirmed import MICRO_STEPS, MOST_TRACED, Tracing
from trainwright.plan.estimates import Cards, Estimate, request_of, why_too_big
from trainwright.plan.job_model import NoEstimate
from trainwright.plan.layout import Layout
from trainwright.plan.least import Unestimated
from trainwright.plan.search import EVAL_FACTOR


def traced_by_rule(
    job: Job, model: NoEstimate, chosen: Unestimated, devices: tuple[Device, ...], tracing: Tracing
) -> tuple[Unestimated, Estimate | None, tuple[str, ...]]:
    """Return the layout with the largest micro-batch whose traced step fits, its memory, and what came of each trace.

    Where a step cannot be traced the layout stays as it is, without an estimate.

    Raises:
        UserError: no traced step fits (exit code 3).
    """
    assert model.config is not None
    layout, cards = chosen.layout, Cards.of(devices)
    sentences: list[str] = []
    free = job.train.micro_batch_size == job.train.gradient_accumulation_steps == "auto"
    for size in _sizes(layout.micro_batch_size, free=free):
        smaller = _with_micro_batch(job, layout, size)
        try:
            memory = _traced(job, model.config, smaller, devices, cards, tracing)
        except UserError as error:
            sentences.append(f"{layout.strategy}: not traced: {'; '.join([error.message, *error.problems])}")
            return chosen, None, tuple(sentences)
        estimate = _estimate(job, memory, smaller, cards, devices)
        too_big = why_too_big(estimate.peak_bytes, cards.capacity)
        batch = f"{size} x {smaller.gradient_accumulation_steps}"
        traced = f"{layout.strategy}, {batch}: traced, {estimate.peak_bytes / GIB:.1f} GiB"
        sentences.append(traced if too_big is None else f"{traced}: {too_big}")
        if too_big is None:
            fitting = dataclasses.replace(chosen, layout=smaller)
            return _told(fitting) if free else fitting, estimate, tuple(sentences)
    raise UserError(
        "no traced step fits on these devices",
        problems=sentences,
        hints=["resources.strategy=fsdp2 shares the weights among the GPUs", "method.type=lora, or larger GPUs"],
        exit_code=ExitCode.NO_PLAN_FITS,
    )


def _sizes(largest: int, *, free: bool) -> list[int]:
    sizes = [largest]
    while free and sizes[-1] > 1 and len(sizes) < MOST_TRACED:
        sizes.append(sizes[-1] // 2)
    return sizes


def _traced(
    job: Job, config: dict[str, object], layout: Layout, devices: tuple[Device, ...], cards: Cards, tracing: Tracing
) -> Memory:
    request = request_of(job, config, layout, devices)
    steps = min(request.gradient_accumulation_steps, MICRO_STEPS)
    return tracing.memory(dataclasses.replace(request, gradient_accumulation_steps=steps), cards.tightest)


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

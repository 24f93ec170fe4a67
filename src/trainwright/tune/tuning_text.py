"""What `tune` prints: the table of the memory guide with measured figures, and what later runs take from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from trainwright.hardware.reading import GIB
from trainwright.job.schedule import steps_per_epoch
from trainwright.plan.estimates import samples_in
from trainwright.plan.explain import seconds
from trainwright.plan.reasons import devices_text
from trainwright.plan.tuned import MeasuredMicroBatch
from trainwright.tune.tuning import TuningResult

HEADER = ("BATCH", "ACCUM", "MEMORY", "USE", "STEP", "SAMPLES/S", "SPEED-UP", "EPOCH", "LEVEL")
ACCEPTED_USE = 0.70
"""Use above which the guide looks no further (S2-34)."""


def answer_lines(answer: TuningResult) -> Iterator[str]:
    """Yield the table and what follows from it; every figure is measured."""
    tuned, planned = answer.tuned, answer.plan.layout
    yield (
        f"Tuned for {answer.job.name}: {devices_text(answer.plan.devices)}, {planned.strategy}, {planned.precision}, "
        f"{planned.ranks} rank{'s' * (planned.ranks > 1)}, {planned.global_batch_size} samples a step"
    )
    yield from _table(answer)
    if tuned.too_large is not None:
        yield f"Too large: {tuned.too_large}: {tuned.why}"
    if tuned.evaluated is not None:
        yield f"Evaluation: batches of up to {tuned.evaluated} went through"
    yield from _advice(answer)
    layout = answer.layout
    yield (
        f"Taken ({tuned.level}): train.micro_batch_size={layout.micro_batch_size}, "
        f"train.gradient_accumulation_steps={layout.gradient_accumulation_steps}, "
        f"eval.batch_size={layout.eval_batch_size}"
    )
    if answer.before:
        yield f"Measured on {tuned.date[:10]}, in {tuned.probes} probes; --fresh measures again"
    else:
        yield f"{tuned.probes} probes, {tuned.steps} steps; later `plan`, `train` and `tune` of this job use it"


def _table(answer: TuningResult) -> Iterator[str]:
    rows = [HEADER, *(_row(answer, point) for point in answer.tuned.points)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()


def _row(answer: TuningResult, point: MeasuredMicroBatch) -> tuple[str, ...]:
    tuned, total, size = answer.tuned, answer.plan.layout.global_batch_size, point.micro_batch_size
    first = tuned.points[0].step_s
    names = [level for level, chosen in tuned.levels.items() if chosen == size]
    names += ["fastest"] if tuned.fastest is point else []
    samples = samples_in(answer.job)
    steps = None if samples is None else steps_per_epoch(samples, total, answer.job.train.drop_last)
    timed = point.step_s is not None and first is not None
    return (
        str(size),
        str(-(-total // (size * answer.plan.layout.ranks))),
        "-" if point.needed_bytes is None else _memory(point.needed_bytes),
        "-" if point.used_share is None else f"{point.used_share:.0%}",
        seconds(point.step_s) if point.step_s is not None else "-",
        f"{total / point.step_s:,.1f}" if point.step_s is not None else "-",
        f"{first / point.step_s:.2f}x" if timed and first and point.step_s else "-",
        seconds(steps * point.step_s) if steps is not None and point.step_s is not None else "-",
        ", ".join(names),
    )


def _memory(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB else f"{size_bytes / 2**20:.1f} MiB"


def _advice(answer: TuningResult) -> Iterator[str]:
    """Say where memory is left that this job has no use for (S2-32), and where it is not the batch that is slow."""
    tuned, largest = answer.tuned, answer.tuned.points[-1]
    share = -(-answer.plan.layout.global_batch_size // answer.plan.layout.ranks)
    used = largest.used_share
    if tuned.too_large is None and largest.micro_batch_size == share and used is not None and used < ACCEPTED_USE:
        yield (
            f"The whole batch of {share} a rank uses {used:.0%}: only a larger train.global_batch_size, which is "
            "another training, would use more"
        )
    fastest = tuned.fastest
    if fastest is not None and fastest.micro_batch_size < largest.micro_batch_size:
        yield f"No faster above {fastest.micro_batch_size}: more samples at once only take more memory"


def answer_as_data(answer: TuningResult) -> dict[str, Any]:
    """Return the answer for `--json`."""
    layout, tuned = answer.layout, dataclasses.asdict(answer.tuned)
    return {
        "schema_version": 1,
        "measured_before": answer.before,
        **tuned,
        "fastest": None if answer.tuned.fastest is None else answer.tuned.fastest.micro_batch_size,
        "layout": dataclasses.asdict(layout),
    }

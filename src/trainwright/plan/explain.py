"""What `plan` prints: the layout, its figures by part, why, the alternatives, and what was rejected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trainwright.estimate.figures import StepTime
from trainwright.estimate.time import busy_bars, pace_bars
from trainwright.hardware.device_text import mixed_gpus_block, strategy_line
from trainwright.hardware.inventory import parse_inventory
from trainwright.hardware.reading import GIB
from trainwright.job.schedule import steps_per_epoch
from trainwright.job.schema import Job
from trainwright.plan.capacity import capacity_of
from trainwright.plan.choose import Plan
from trainwright.plan.estimates import Amount, Estimate, why_too_big
from trainwright.plan.layout import Layout
from trainwright.plan.reasons import at_once, describe, device_text, devices_text
from trainwright.plan.search import Candidate

MOST_ROWS = 8
FRAMER = "framer-lora"
"""The task of the guide that says so of ZeRO-2 (S0-27)."""
SMALLEST_PART = 0.01
"""Parts below this share of their sum are printed together."""


def explain(job: Job, plan: Plan, amount: Amount) -> list[str]:
    """Return the whole text of a plan; every figure in it is an estimate unless it says claim."""
    sections = [
        _not_known(plan),
        _layout(job, plan),
        _figures(job, plan, amount),
        _why(plan),
        _ranking(plan),
        _rejected(plan),
        claims(job),
    ]
    lines: list[str] = []
    for section in sections:
        found = list(section)
        if found:
            lines += ["", *found] if lines else found
    return lines


def claims(job: Job) -> Iterator[str]:
    """What a guide says of this job, marked as such."""
    if job.claims:
        yield "Claimed by the guide, not measured here"
        yield from (f"  {what}: {figure}" for what, figure in job.claims.items())


def _not_known(plan: Plan) -> Iterator[str]:
    if plan.not_known is None:
        return
    yield plan.not_known
    yield from plan.traces
    if plan.least is not None:
        yield f"  parameters counted from {plan.least.source}"
    else:
        yield "  what follows is a layout by rule, and no plan"


def _layout(job: Job, plan: Plan) -> Iterator[str]:
    layout = plan.layout
    offload = "" if layout.offload == "none" else f", {layout.offload} in host memory"
    kind = "Plan" if plan.is_known else "Layout by rule"
    yield f"{kind} for {job.name}: {devices_text(plan.devices)}, {layout.strategy}{offload}, {layout.precision}"
    yield from _batch(layout)
    checkpointing = "on" if layout.gradient_checkpointing else "off"
    yield f"  gradient checkpointing {checkpointing}; evaluation batch {layout.eval_batch_size}"
    if layout.strategy == "fsdp2" and layout.gradient_accumulation_steps > 1:
        when = "in every micro-batch" if layout.sync_each_micro_batch else "once a step; they are whole until then"
        yield f"  gradients are reduced {when}"
    line = stage_line(job, plan)
    if line is not None:
        yield f"  {line}"
    yield from mixed_gpus_block(plan.devices)
    yield from (f"warning: {warning}" for warning in plan.warnings)


def stage_line(job: Job, plan: Plan) -> str | None:
    """Return the guide's line for a ZeRO stage; whether 40 GB suffice is estimated, or what the guide says."""
    card = parse_inventory("a100-40gb").usable[0]
    room = capacity_of(card)
    assert room is not None
    needed = None if plan.estimate is None else plan.estimate.peak_bytes
    fits_40gb = job.task == FRAMER if needed is None else why_too_big(needed, room) is None
    return strategy_line(plan.layout.strategy, plan.devices, fits_40gb=fits_40gb)


def _batch(layout: Layout) -> Iterator[str]:
    if layout.rank_samples:
        shares, sizes = (" + ".join(map(str, each)) for each in (layout.rank_samples, layout.rank_micro_batch_sizes))
        yield f"  samples of a step on each rank: {shares} = {layout.global_batch_size}"
        yield f"  at once: {sizes}, in {layout.gradient_accumulation_steps} micro-steps"
        return
    product = layout.micro_batch_size * layout.gradient_accumulation_steps * layout.ranks
    equation = f"{layout.micro_batch_size} x {layout.gradient_accumulation_steps} x {layout.ranks} = {product}"
    kept = (
        ""
        if product == layout.global_batch_size
        else f"; the last parts are smaller, {layout.global_batch_size} in all"
    )
    yield f"  micro-batch x accumulation x ranks = {equation} samples a step{kept}"


def _figures(job: Job, plan: Plan, amount: Amount) -> Iterator[str]:
    if plan.estimate is None:
        yield from _steps(job, amount)
        return
    estimate = plan.estimate
    yield "Estimate"
    for basis in (estimate.memory_basis, estimate.time_basis):
        if basis is not None and basis.note is not None:
            yield f"  {'memory' if basis is estimate.memory_basis else 'time'} {basis.note}"
    yield from _memory(estimate, plan.traces)
    yield from _time(job, estimate, amount, [device.name for device in plan.devices])
    yield from _steps(job, amount)
    if estimate.run is not None:
        run = estimate.run
        yield (
            f"  run                 {seconds(run.run_s)} ({seconds(run.low_s)} to {seconds(run.high_s)}), "
            f"{run.gpu_hours:,.1f} GPU-hours"
        )
    elif estimate.time is not None:
        yield "  run                 not known without the number of samples: --samples N"


def _memory(estimate: Estimate, traces: Sequence[str]) -> Iterator[str]:
    memory = estimate.memory
    yield f"  memory of each GPU  {_use(estimate)}"
    yield f"    {_by_part(memory.parts_bytes, GIB, 'GiB')}"
    yield f"    highest at: {memory.peak}"
    outside = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.outside_bytes.items())
    yield (
        f"    allocated {memory.allocated_bytes / GIB:.2f} GiB, reserved {memory.reserved_bytes / GIB:.2f}, "
        f"in nvidia-smi {memory.device_bytes / GIB:.2f}" + (f" ({outside})" if outside else "")
    )
    yield from (f"    {trace}" for trace in traces)
    if memory.evaluation_bytes is not None:
        yield f"    evaluation: allocated {memory.evaluation_bytes / GIB:.2f} GiB"
    if estimate.host is not None:
        yield f"  host memory         {estimate.host.node_bytes / GIB:.1f} GiB a node"


def _time(job: Job, estimate: Estimate, amount: Amount, names: list[str]) -> Iterator[str]:
    time = estimate.time
    if time is None:
        yield f"  time                not estimated: {estimate.no_time}"
        return
    yield f"  step                {seconds(time.step_s)} ({seconds(time.low_s)} to {seconds(time.high_s)})"
    yield f"    {_by_part(time.parts_s, 1.0, 's')}"
    yield f"    the pace is set by: {time.limit}"
    tokens = job.train.global_batch_size * (amount.tokens_per_sample or job.data.max_length)
    known = "" if amount.tokens_per_sample else " if every sample is max_length long"
    yield f"    {tokens / time.step_s:,.0f} tokens a second{known}"
    yield from _pace(estimate, time, names)


def _pace(estimate: Estimate, time: StepTime, names: list[str]) -> Iterator[str]:
    """The GPUs' bars where they are not alike; with parts by speed, also those of equal parts (S0-08)."""
    equal = estimate.equal_parts
    if equal is not None:
        yield "    with equal parts:"
        yield from (f"    {bar}" for bar in pace_bars(equal, names))
        yield f"    with parts by speed, {equal.step_s / time.step_s:.2f} x as fast:"
        yield from (f"    {bar}" for bar in busy_bars(time, names))
    elif len(set(time.ranks_s)) > 1:
        yield from (f"    {bar}" for bar in pace_bars(time, names))


def _steps(job: Job, amount: Amount) -> Iterator[str]:
    if amount.samples is None:
        return
    total = job.train.global_batch_size
    per_epoch = steps_per_epoch(amount.samples, total, job.train.drop_last)
    rounded = "the rest is left out" if job.train.drop_last else "the last one smaller"
    yield (
        f"  steps per epoch     {per_epoch:,} ({amount.samples:,} samples / {total}"
        + (f", {rounded})" if amount.samples % total else ")")
    )


def _why(plan: Plan) -> Iterator[str]:
    yield "Why"
    for key, choice in sorted(plan.choices.items()):
        yield f"  {key} = {_plain(choice.value)}: {choice.reason}"
    yield from (f"  learning rate: {line}" for line in plan.advice)


def _ranking(plan: Plan) -> Iterator[str]:
    """Other ways to use the same GPUs, then the best way to use others."""
    fitting = [candidate for candidate in plan.ranked if candidate.why_not is None]
    here = [candidate for candidate in fitting if candidate.devices == plan.devices]
    elsewhere: dict[object, Candidate] = {}
    for candidate in fitting:
        if candidate.devices != plan.devices:
            elsewhere.setdefault(candidate.devices, candidate)
    yield from _table("On these GPUs, best first", here)
    if here and elsewhere:
        yield ""
    yield from _table("On other GPUs, best first", list(elsewhere.values()))


def _table(title: str, candidates: list[Candidate]) -> Iterator[str]:
    if not candidates:
        return
    header = ("GPUS", "STRATEGY", "BATCH", "CKPT", "GIB", "STEP", "RUN", "GPU-H")
    rows = [header, *(_row(candidate) for candidate in candidates[:MOST_ROWS])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    yield title
    for row in rows:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
    if len(candidates) > MOST_ROWS:
        yield f"  and {len(candidates) - MOST_ROWS} more: --json has them all"


def _row(candidate: Candidate) -> tuple[str, ...]:
    layout, estimate = candidate.layout, candidate.estimate
    return (
        device_text(candidate),
        short_strategy(layout),
        f"{layout.micro_batch_size} x {layout.gradient_accumulation_steps}",
        "on" if layout.gradient_checkpointing else "off",
        f"{estimate.peak_bytes / GIB:.1f}",
        "-" if estimate.time is None else seconds(estimate.time.step_s),
        "-" if estimate.run is None else seconds(estimate.run.run_s),
        "-" if estimate.run is None else f"{estimate.run.gpu_hours:,.1f}",
    )


def short_strategy(layout: Layout) -> str:
    """Return strategy, offload and reductions for a column: `zero3+opt`, `fsdp2+sync`."""
    each = "+sync" if layout.sync_each_micro_batch else ""
    offload = {"none": "", "optimizer": "+opt", "optimizer+parameters": "+opt+par"}[layout.offload]
    return layout.strategy + each + offload


def _rejected(plan: Plan) -> Iterator[str]:
    """What fails on the GPUs of the plan, and the sets of GPUs on which nothing fits."""
    fitting = {candidate.devices for candidate in plan.ranked if candidate.why_not is None}
    shown: dict[object, Candidate] = {}
    for candidate in plan.ranked:
        if candidate.why_not is None:
            continue
        layout = candidate.layout
        if candidate.devices == plan.devices:
            shown[(layout.strategy, layout.offload)] = candidate
        elif candidate.devices not in fitting:
            shown.setdefault(candidate.devices, candidate)
    if shown:
        yield "Does not fit"
        yield from (f"  {describe(each)}: {each.why_not} ({at_once(each)})" for each in shown.values())


def _use(estimate: Estimate) -> str:
    peak = estimate.peak_bytes / GIB
    if estimate.capacity is None or estimate.used_share is None:
        return f"{peak:.1f} GiB; how much there is, is not known"
    capacity = estimate.capacity.total_bytes / GIB
    return f"{peak:.1f} of {capacity:.1f} GiB ({estimate.used_share:.0%}; {estimate.capacity.reason})"


def _by_part(parts: Mapping[str, float] | Mapping[str, int], unit: float, name: str) -> str:
    whole = sum(parts.values())
    large = [(part, size) for part, size in parts.items() if size >= SMALLEST_PART * whole]
    rest = whole - sum(size for _, size in large)
    figures = [f"{part} {size / unit:.2f}" for part, size in sorted(large, key=lambda item: -item[1])]
    if rest > 0:
        figures.append(f"other {rest / unit:.2f}")
    return ", ".join(figures) + f" {name}"


def seconds(value: float) -> str:
    """Return a duration as people say it: `0.42 s`, `3 min 20 s`, `5 h 12 min`, `2 d 4 h`."""
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes, hours, days = round(value / 60), value / 3600, value / 86400
    if value < 3600:
        return f"{int(value // 60)} min {int(value % 60)} s"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{int(days)} d {round((days - int(days)) * 24)} h"


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Every sensible layout with its estimate, and their order by the goal asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from trainwright.anatomy import Anatomy
from trainwright.estimate.calibration import Calibration
from trainwright.estimate.closed import memory
from trainwright.estimate.figures import Memory
from trainwright.estimate.host_memory import host_memory
from trainwright.estimate.measured_runs import Kind, gpu_model, kind_of
from trainwright.estimate.request import Request
from trainwright.hardware.catalog import GpuSpec
from trainwright.hardware.inventory import Device, Host
from trainwright.hardware.precision import PrecisionChoice, choose_precision
from trainwright.hardware.selection import cuda_environment
from trainwright.job.schema import Job
from trainwright.plan.balance import best_equal_parts, shares_by_speed
from trainwright.plan.capacity import MARGIN
from trainwright.plan.estimates import (
    Amount,
    Cards,
    Estimate,
    as_timed,
    request_of,
    why_too_big,
    why_too_big_for_host,
    with_step_time,
    with_time,
)
from trainwright.plan.job_model import PlannedModel
from trainwright.plan.layout import Layout
from trainwright.plan.options import (
    OFFLOADS,
    SIMPLEST_FIRST,
    BatchSplit,
    Sharing,
    batches,
    global_batch,
    reductions,
    sharings,
)

Goal = Literal["soonest", "fastest", "cheapest", "fewest-gpus"]
GOALS: tuple[str, ...] = get_args(Goal)

EVAL_FACTOR = 3
"""Evaluation keeps no gradients, so it takes three times the micro-batch where that fits (S2-22)."""
BATCHES_TIMED = 3
"""Of the micro-batches that fit, the largest ones whose time is compared."""
DOUBT = 0.25
"""What the quick estimate says of reserved memory may be too high by as much; by 17 % was the most that was seen with
models of the catalogue (benchmarks/closed_form.py --whole), and a replay is the judge."""
SAME_TIME = 0.03
"""Times this near each other count as equal: estimates are not finer."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout on certain devices with its estimate; `why_not` says why it cannot be taken.

    `doubt` is what the quick estimate has against it, where that may be wrong: it counts as one that fits until it has
    been `confirmed`, by a replay of its step. `trace` says what became of tracing the step: None where nobody asked.
    """

    layout: Layout
    devices: tuple[Device, ...]
    request: Request
    kind: Kind
    estimate: Estimate
    why_not: str | None = None
    doubt: str | None = None
    confirmed: bool = False
    trace: str | None = None


Measure = Callable[[Anatomy, Request, GpuSpec | None], Memory]
"""How memory is estimated: quickly, or by a replay."""


@dataclass(frozen=True, kw_only=True)
class DeviceSharing:
    """One way to share the work on certain devices, whatever the micro-batch."""

    devices: tuple[Device, ...]
    cards: Cards
    kind: Kind
    layout: Layout
    request: Request

    @staticmethod
    def of(candidate: Candidate) -> DeviceSharing:
        """That of a candidate."""
        return DeviceSharing(
            devices=candidate.devices,
            cards=Cards.of(candidate.devices),
            kind=candidate.kind,
            layout=candidate.layout,
            request=candidate.request,
        )


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What is asked of a search: the job and which of its keys were given, its model, the host, how much data.

    `calibration` holds what earlier runs on this machine measured.
    """

    job: Job
    given: frozenset[str]
    model: PlannedModel
    host: Host
    amount: Amount
    calibration: Calibration
    expanding_by: str | None = None
    """The environment variable that lets segments of torch's allocator expand."""


def weakest_precision(job: Job, devices: Sequence[Device]) -> PrecisionChoice:
    """Return the precision that all devices can do."""
    choices = [choose_precision(device, job.resources.precision) for device in devices]
    return min(choices, key=lambda choice: ("fp32", "fp16", "bf16").index(choice.value))


def search(question: SearchRequest, device_sets: Iterable[tuple[Device, ...]], goal: Goal) -> list[Candidate]:
    """Return a candidate for every way to share the work on every set of devices, best first, those that fail last."""
    found = [candidate for devices in device_sets for candidate in _on(question, devices)]
    return in_order(found, goal)


def in_order(candidates: Iterable[Candidate], goal: Goal) -> list[Candidate]:
    """Return the candidates, best first by the goal, those that fail last."""
    return sorted(candidates, key=lambda candidate: _order(candidate, goal))


def _on(question: SearchRequest, devices: tuple[Device, ...]) -> Iterator[Candidate]:
    job, kind, ranks = question.job, devices[0].kind, len(devices)
    total = global_batch(job, question.given, ranks)
    if ranks > total:
        return
    asked = job.train.gradient_checkpointing
    for sharing in sharings(job, ranks, kind):
        for checkpointing in (False, True) if asked == "auto" else (asked,):
            for each, sizes in reductions(job, sharing.strategy, batches(job, total, ranks)):
                base = _layout(question, devices, sharing, total, sizes[0], checkpointing=checkpointing, each=each)
                yield from _batches(question, devices, base, sizes)


def _layout(
    question: SearchRequest,
    devices: tuple[Device, ...],
    sharing: Sharing,
    total: int,
    first: BatchSplit,
    *,
    checkpointing: bool,
    each: bool,
) -> Layout:
    kind = devices[0].kind
    return Layout(
        device=kind,
        visible_devices=visible_devices(devices),
        ranks=len(devices),
        strategy=sharing.strategy,
        precision=weakest_precision(question.job, devices).value,
        offload=sharing.offload,
        global_batch_size=total,
        micro_batch_size=first.micro_batch_size,
        gradient_accumulation_steps=first.gradient_accumulation_steps,
        eval_batch_size=_eval_batch(question.job, first.micro_batch_size, EVAL_FACTOR),
        gradient_checkpointing=checkpointing,
        sync_each_micro_batch=each,
    )


def visible_devices(devices: Sequence[Device]) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of the ranks on one node, None off CUDA."""
    if devices[0].kind != "cuda":
        return None
    return cuda_environment([device for device in devices if device.node == devices[0].node])["CUDA_VISIBLE_DEVICES"]


def _batches(
    question: SearchRequest, devices: tuple[Device, ...], base: Layout, sizes: list[BatchSplit]
) -> Iterator[Candidate]:
    """Time the largest micro-batches that fit, and one that might; where none does, say what the smallest needs."""
    way = DeviceSharing(
        devices=devices,
        cards=Cards.of(devices),
        kind=kind_of(
            (gpu_model(device) for device in devices),
            strategy=base.strategy,
            method=question.job.method.type,
            precision=base.precision,
        ),
        layout=base,
        request=dataclasses.replace(
            request_of(question.job, question.model.config, base, devices),
            expandable_segments=question.expanding_by is not None,
        ),
    )
    low, high = 0, len(sizes)
    tried: dict[int, Candidate] = {}

    def at(index: int) -> Candidate:
        if index not in tried:
            tried[index] = estimated(question, way, sizes[index])
        return tried[index]

    while low < high:
        middle = (low + high) // 2
        if at(middle).why_not is None:
            high = middle
        else:
            low = middle + 1
    if low > 0:
        too_big = at(low - 1)
        if _in_doubt(too_big):
            yield _timed(question, dataclasses.replace(too_big, why_not=None, doubt=too_big.why_not))
        elif low == len(sizes):
            yield too_big
    for index in range(low, min(low + BATCHES_TIMED, len(sizes))):
        yield _timed(question, at(index))


def _in_doubt(too_big: Candidate) -> bool:
    """Whether it may fit on the GPU after all: only a host that is too small is certain."""
    share = too_big.estimate.used_share
    return too_big.estimate.host is None and share is not None and share <= (1 - MARGIN) * (1 + DOUBT)


def estimated(question: SearchRequest, way: DeviceSharing, size: BatchSplit, measure: Measure = memory) -> Candidate:
    """Return the candidate with this micro-batch and the largest evaluation batch that fits beside it, not timed."""
    job = question.job
    micro, accumulation = size.micro_batch_size, size.gradient_accumulation_steps
    found: Candidate | None = None
    for factor in range(EVAL_FACTOR, 0, -1):
        evaluation = _eval_batch(job, micro, factor)
        layout = dataclasses.replace(
            way.layout,
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            eval_batch_size=evaluation,
        )
        evaluates = way.request.evaluation_batch_size is not None
        asked = dataclasses.replace(
            way.request,
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            evaluation_batch_size=evaluation if evaluates else None,
        )
        found = _with_memory(question, dataclasses.replace(way, layout=layout, request=asked), measure)
        evaluation_is_too_big = (
            found.why_not and why_too_big(found.estimate.memory.device_bytes, way.cards.capacity) is None
        )
        if not evaluation_is_too_big or job.eval.batch_size != "auto":
            break
    assert found is not None
    return found


def _with_memory(question: SearchRequest, way: DeviceSharing, measure: Measure) -> Candidate:
    anatomy, cards, request = question.model.anatomy, way.cards, way.request
    first = measure(anatomy, request, cards.tightest)
    step, basis = question.calibration.memory(first, way.kind)
    estimate = Estimate(memory=step, memory_basis=basis, first_memory=first, capacity=cards.capacity, host=None)
    why_not = why_too_big(estimate.peak_bytes, cards.capacity)
    if why_not is None:
        host = host_memory(anatomy, request, cards.ranks_on_node, step=step, merge=question.job.method.merge)
        estimate = dataclasses.replace(estimate, host=host)
        why_not = why_too_big_for_host(question.job, host, question.host)
    return Candidate(
        layout=way.layout, devices=way.devices, request=request, kind=way.kind, estimate=estimate, why_not=why_not
    )


def _timed(question: SearchRequest, candidate: Candidate) -> Candidate:
    estimate = with_time(
        candidate.estimate,
        question.job,
        question.model.anatomy,
        candidate.request,
        candidate.devices,
        question.amount,
        question.calibration,
        candidate.kind,
    )
    return _balanced(question, dataclasses.replace(candidate, estimate=estimate))


def _balanced(question: SearchRequest, candidate: Candidate) -> Candidate:
    """Return the candidate with parts by the GPUs' speeds, where that is faster and nobody asked for other parts."""
    job, layout, request, equal = question.job, candidate.layout, candidate.request, candidate.estimate.time
    given = (job.train.micro_batch_size, job.train.gradient_accumulation_steps)
    if equal is None or min(equal.ranks_s) == max(equal.ranks_s) or not _may_balance(job):
        return candidate

    def on(device: Device, micro: int) -> Estimate:
        return _memory_on(question, candidate, device, micro)

    def fits(device: Device, micro: int) -> bool:
        limit = micro if given[0] == "auto" else given[0]
        estimate = on(device, micro)
        return micro <= limit and why_too_big(estimate.peak_bytes, estimate.capacity) is None

    anatomy, amount = question.model.anatomy, question.amount
    timed = as_timed(request, amount)
    shares = shares_by_speed(anatomy, timed, candidate.devices, equal, layout.global_batch_size, fits)
    if shares is None or given[1] not in ("auto", shares.gradient_accumulation_steps):
        return candidate
    if given[1] == "auto":
        equal = best_equal_parts(anatomy, timed, candidate.devices, equal, layout.global_batch_size, fits)
    estimate = with_step_time(
        dataclasses.replace(
            fullest(question, candidate, shares.rank_micro_batch_sizes), host=candidate.estimate.host, equal_parts=equal
        ),
        shares.step,
        job,
        anatomy,
        timed,
        candidate.devices,
        amount,
        question.calibration,
        candidate.kind,
    )
    assert estimate.time is not None
    if estimate.time.step_s * (1 + SAME_TIME) > equal.step_s:
        return candidate
    uneven = dataclasses.replace(
        layout,
        micro_batch_size=max(shares.rank_micro_batch_sizes),
        gradient_accumulation_steps=shares.gradient_accumulation_steps,
        rank_samples=shares.rank_samples,
        rank_micro_batch_sizes=shares.rank_micro_batch_sizes,
        sync_each_micro_batch=layout.sync_each_micro_batch and shares.gradient_accumulation_steps > 1,
    )
    return dataclasses.replace(candidate, layout=uneven, estimate=estimate)


def _may_balance(job: Job) -> bool:
    """Whether the workers are ours: a script of the user's own takes the same batch on every rank."""
    return job.resources.balance == "auto" and job.script is None


def fullest(
    question: SearchRequest, candidate: Candidate, rank_micro_batch_sizes: Sequence[int], measure: Measure = memory
) -> Estimate:
    """Return the memory of the rank that has the least room left, where each has a micro-batch of its own."""
    pairs = dict.fromkeys(zip(candidate.devices, rank_micro_batch_sizes, strict=True))
    estimates = {pair: _memory_on(question, candidate, *pair) for pair in pairs}
    tightest = max(pairs, key=lambda pair: estimates[pair].used_share or 0.0)
    return estimates[tightest] if measure is memory else _memory_on(question, candidate, *tightest, measure)


def _memory_on(
    question: SearchRequest, candidate: Candidate, device: Device, micro: int, measure: Measure = memory
) -> Estimate:
    """Return the memory of a rank on one GPU with a micro-batch of its own."""
    card = Cards.of((device,))
    request = dataclasses.replace(candidate.request, micro_batch_size=micro)
    first = measure(question.model.anatomy, request, card.tightest)
    step, basis = question.calibration.memory(first, candidate.kind)
    return Estimate(memory=step, memory_basis=basis, first_memory=first, capacity=card.capacity, host=None)


def _eval_batch(job: Job, micro: int, factor: int) -> int:
    return factor * micro if job.eval.batch_size == "auto" else job.eval.batch_size


def _order(candidate: Candidate, goal: Goal) -> tuple[object, ...]:
    """Feasible before infeasible, without offload before with it, then the goal, then the simpler of what is equal.

    Offload makes room where there is none; that it is faster as well is nothing that estimates can tell.
    """
    layout, estimate, count = candidate.layout, candidate.estimate, len(candidate.devices)
    simplicity = (
        SIMPLEST_FIRST.index(layout.strategy),
        OFFLOADS.index(layout.offload),
        layout.gradient_checkpointing,
        layout.sync_each_micro_batch,
        estimate.memory.device_bytes,
        layout.visible_devices or "",
    )
    if candidate.why_not is not None:
        return (1, estimate.memory.device_bytes, count, *simplicity)
    if estimate.time is None:
        # Nothing is known of the speed: all devices, as the user offered them, and the simplest way to use them.
        return (0, 1, count if goal == "fewest-gpus" else -count, *simplicity)
    step_s, offloads = estimate.time.step_s, int(layout.offload != "none")
    wanted: dict[str, tuple[int, ...]] = {
        "soonest": (offloads, _rounded(step_s), count),
        "fastest": (offloads, _rounded(step_s), count),
        "cheapest": (offloads, _rounded(step_s * count), _rounded(step_s)),
        "fewest-gpus": (count, offloads, _rounded(step_s)),
    }
    return (0, 0, *wanted[goal], *simplicity)


def _rounded(seconds: float) -> int:
    return round(math.log(seconds) / math.log1p(SAME_TIME))

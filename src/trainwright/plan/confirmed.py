"""The best layouts by the quick estimate, each looked at closely until one of them stands.

Thousands of layouts are put in order by a formula whose reserved memory may be off by a fifth. What is planned is
confirmed: every piece of its step is replayed through the allocator, and, where that is asked for, the step is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainwright.errors import UserError
from trainwright.estimate.calibration import Basis
from trainwright.estimate.closed import replayed
from trainwright.estimate.figures import Memory
from trainwright.estimate.recorded_traces import RecordedTraces
from trainwright.estimate.request import Request
from trainwright.hardware.catalog import GpuSpec
from trainwright.hardware.reading import GIB
from trainwright.plan.estimates import Cards, why_too_big
from trainwright.plan.layout import Layout
from trainwright.plan.options import BatchSplit
from trainwright.plan.search import Candidate, DeviceSharing, Goal, SearchRequest, estimated, fullest, in_order

MOST_TRACED = 6
"""A trace takes seconds; layouts that come after so many are no longer near the best."""
IN_DOUBT = 0.8
"""Share of a GPU from which what is about to run is traced: the closed form describes one version of transformers, and
another may be installed (T5's of 5.17 takes a third more; benchmarks/results/gpu_truth_h100.json)."""
MICRO_STEPS = 2
"""Traced of a step: the second finds the gradients of the first, and all that follow are like it."""


@dataclass(frozen=True)
class Tracing:
    """How steps are traced, and from which share of a GPU on a layout is that has a closed form; others always are."""

    memory: Callable[[Request, GpuSpec | None], Memory]
    from_share: float = 0.0
    given: RecordedTraces | None = None
    """What torch told of the model elsewhere."""


def confirmed(
    question: SearchRequest,
    ranked: Sequence[Candidate],
    take: Callable[[Sequence[Candidate]], Candidate],
    goal: Goal,
    tracing: Tracing | None = None,
    keep: Layout | None = None,
) -> list[Candidate]:
    """Return the candidates in order again, those confirmed that `take` took until it took one a second time.

    What is still in doubt then, and was not taken, counts as too big. `keep` is not traced: it has been before.
    """
    found, traces = list(ranked), 0
    while not (best := take(found)).confirmed:
        closer = _replayed(question, best)
        if tracing is not None and traces < MOST_TRACED and _is_traced(closer, tracing, keep):
            closer = _traced(closer, tracing)
            traces += 1
        found = in_order([closer if candidate is best else candidate for candidate in found], goal)
    doubted = [c if c.doubt is None else dataclasses.replace(c, why_not=c.doubt, doubt=None) for c in found]
    return in_order(doubted, goal)


def trace_lines(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Return a sentence for each candidate whose step was to be traced."""
    sentences = []
    for candidate in candidates:
        if candidate.trace is not None:
            layout = candidate.layout
            checkpointing = ", checkpointed" if layout.gradient_checkpointing else ""
            each = ", reducing each time" if layout.sync_each_micro_batch else ""
            refused = "" if candidate.why_not is None else f": {candidate.why_not}"
            batch = f"{layout.micro_batch_size} x {layout.gradient_accumulation_steps}"
            sentences.append(f"{layout.strategy}, {batch}{checkpointing}{each}: {candidate.trace}{refused}")
    return tuple(sentences)


def _replayed(question: SearchRequest, candidate: Candidate) -> Candidate:
    """Return the candidate with the memory of a replayed step; of unequal parts that of the rank with the least room.

    Its time stays. An evaluation batch that turns out to be too big is made smaller, where nobody asked for it.
    """
    layout, first = candidate.layout, candidate.estimate
    if layout.rank_micro_batch_sizes:
        closer = fullest(question, candidate, layout.rank_micro_batch_sizes, replayed)
        closer = dataclasses.replace(closer, host=first.host)
        found = dataclasses.replace(candidate, why_not=why_too_big(closer.peak_bytes, closer.capacity))
    else:
        size = BatchSplit(layout.micro_batch_size, layout.gradient_accumulation_steps)
        found = estimated(question, DeviceSharing.of(candidate), size, replayed)
        closer = found.estimate
    estimate = dataclasses.replace(
        first,
        memory=closer.memory,
        memory_basis=closer.memory_basis,
        first_memory=closer.first_memory,
        host=closer.host,
    )
    return dataclasses.replace(found, estimate=estimate, doubt=None, confirmed=True)


def _is_traced(candidate: Candidate, tracing: Tracing, keep: Layout | None) -> bool:
    share = candidate.estimate.used_share
    filled = share is None or share >= tracing.from_share
    return candidate.why_not is None and filled and candidate.layout != keep


def _traced(candidate: Candidate, tracing: Tracing) -> Candidate:
    """Return the candidate with the memory of a traced step.

    It is not corrected by earlier runs, whose corrections are of the closed form.
    """
    if candidate.layout.rank_samples:
        return dataclasses.replace(candidate, trace="not traced: the ranks have parts of different size")
    cards, request = Cards.of(candidate.devices), candidate.request
    micro_steps = min(request.gradient_accumulation_steps, MICRO_STEPS)
    try:
        memory = tracing.memory(dataclasses.replace(request, gradient_accumulation_steps=micro_steps), cards.tightest)
    except UserError as error:
        return dataclasses.replace(candidate, trace=f"not traced: {'; '.join([error.message, *error.problems])}")
    estimate = dataclasses.replace(candidate.estimate, memory=memory, memory_basis=Basis(candidate.kind))
    before, after = (f"{found.peak_bytes / GIB:.1f} GiB" for found in (candidate.estimate, estimate))
    return dataclasses.replace(
        candidate,
        estimate=estimate,
        why_not=why_too_big(estimate.peak_bytes, cards.capacity),
        trace=f"traced, {after} (closed form {before})",
    )

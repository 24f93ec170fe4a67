"""The best layouts by the closed form, each held to a traced step until one of them stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainwright.errors import UserError
from trainwright.estimate.calibration import Basis
from trainwright.estimate.figures import Memory
from trainwright.estimate.request import Request
from trainwright.hardware.catalog import Gpu
from trainwright.hardware.reading import GIB
from trainwright.plan.estimates import Cards, why_too_big
from trainwright.plan.search import Candidate, Goal, in_order

MOST_TRACED = 6
"""A trace takes seconds; layouts that come after so many are no longer near the best."""
IN_DOUBT = 0.8
"""Share of a GPU from which an estimate by the closed form may be wrong about whether a layout fits: what it says of
reserved memory was off by 15 % at most where it was measured (benchmarks/results/gpu_truth_h100.json)."""
MICRO_STEPS = 2
"""Traced of a step: the second finds the gradients of the first, and all that follow are like it."""


@dataclass(frozen=True)
class Tracing:
    """How steps are traced, and from which share of a GPU on a layout is."""

    memory: Callable[[Request, Gpu | None], Memory]
    from_share: float = 0.0


def traced(
    ranked: Sequence[Candidate], take: Callable[[Sequence[Candidate]], Candidate], goal: Goal, tracing: Tracing
) -> list[Candidate]:
    """Return the candidates in order again, those traced that `take` took until it took one a second time.

    What the trace says is not corrected by earlier runs, whose corrections are of the closed form.
    """
    found = list(ranked)
    for _ in range(MOST_TRACED):
        best = take(found)
        share = best.estimate.used_share
        if best.why_not is not None or best.trace is not None or (share is not None and share < tracing.from_share):
            break
        found = in_order([_traced(c, tracing) if c is best else c for c in found], goal)
    return found


def told(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Return a sentence for each candidate whose step was to be traced."""
    sentences = []
    for candidate in candidates:
        if candidate.trace is not None:
            layout = candidate.layout
            checkpointing = ", checkpointed" if layout.gradient_checkpointing else ""
            refused = "" if candidate.why_not is None else f": {candidate.why_not}"
            batch = f"{layout.micro_batch_size} x {layout.gradient_accumulation_steps}"
            sentences.append(f"{layout.strategy}, {batch}{checkpointing}: {candidate.trace}{refused}")
    return tuple(sentences)


def _traced(candidate: Candidate, tracing: Tracing) -> Candidate:
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

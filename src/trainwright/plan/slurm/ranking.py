"""Requests by when the model is finished, wait and run together, and the four strategies of the FramerTurbo guide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from trainwright.plan.slurm.planned import Impossible, PlannedRequest
from trainwright.plan.slurm.shapes import GpuShape
from trainwright.plan.slurm.wait import Wait

SAME_FINISH: Final = 0.03
"""Finish times this near the soonest count as equal to it, as in the choice of a layout."""
WHOLE_S: Final = 60
"""Waits are known to the minute at best."""


@dataclass(frozen=True)
class GuideStrategy:
    """One of the guide's ways to ask (S0-19 to S0-22) and what the guide claims of it.

    Of several types of GPU it takes the one that starts or finishes first or runs the shortest, as it `prefers`.
    """

    name: str
    gpus: int
    is_flexible: bool
    prefers: Literal["start", "finish", "run"]
    claim: str

    def matches(self, shape: GpuShape) -> bool:
        """Whether a shape is this way to ask, whatever the type."""
        return (shape.nodes, shape.gpus_per_node, shape.is_flexible) == (1, self.gpus, self.is_flexible)

    def choose(self, ranked: Iterable[Ranked]) -> Ranked | None:
        """Return the request that this strategy is, of requests in the order of their finish."""
        alike = [each for each in ranked if self.matches(each.planned.shape)]
        match self.prefers:
            case "start":
                return min(alike, key=lambda each: (whole_minutes(each.wait.wait_s), run_s(each.planned)), default=None)
            case "run":
                return min(alike, key=lambda each: run_s(each.planned), default=None)
            case "finish":
                return next(iter(alike), None)


STRATEGIES: Final = (
    GuideStrategy("quick start", 2, False, "start", "short queue, 1.5-2x one GPU, about 1.5 days where 4 GPUs take 1"),
    GuideStrategy("balanced", 3, False, "finish", "fast (2.2x)"),
    GuideStrategy("fastest", 4, False, "run", "long queue, 3.2x"),
    GuideStrategy("flexible", 4, True, "finish", "fastest queue; may get mixed GPUs, speed unpredictable"),
)


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A planned request with its wait; `finish_s` from now, None where the wait or the run is not known."""

    planned: PlannedRequest
    wait: Wait

    @property
    def finish_s(self) -> float | None:
        """Seconds from now to the finished model."""
        if self.wait.wait_s is None or self.planned.run is None:
            return None
        return self.wait.wait_s + self.planned.run.run_s


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What became of a strategy on this cluster: the request that it is here, or why there is none."""

    strategy: GuideStrategy
    ranked: Ranked | None
    why_not: str | None


@dataclass(frozen=True, kw_only=True)
class SlurmPlan:
    """The requests, soonest finished first; those not asked about, as their runs alone end later; and the impossible.

    `asked_at` is when Slurm was asked, in ISO 8601 with the offset to UTC; `gpus_asked` the number that the job names.
    """

    cluster: str
    version: str
    asked_at: str
    gpus_asked: int | None
    ranked: tuple[Ranked, ...]
    refused: tuple[Ranked, ...]
    not_asked: tuple[PlannedRequest, ...]
    impossible: tuple[Impossible, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> Ranked:
        """The request to make."""
        return self.ranked[0]

    def strategies(self) -> Iterator[Followed]:
        """Yield the guide's four as they are on this cluster."""
        for strategy in STRATEGIES:
            ranked = strategy.choose(self.ranked)
            yield Followed(strategy=strategy, ranked=ranked, why_not=None if ranked else self._why_not(strategy))

    def _why_not(self, strategy: GuideStrategy) -> str:
        for each in self.refused:
            if strategy.matches(each.planned.shape):
                return f"Slurm refuses it: {each.wait.refused}"
        for impossible in self.impossible:
            if strategy.matches(impossible.shape):
                return f"{impossible.shape}: {impossible.why}"
        if any(strategy.matches(planned.shape) for planned in self.not_asked):
            return "not asked about: its run alone ends later than the best"
        if self.gpus_asked not in (None, strategy.gpus):
            return f"the job asks for {self.gpus_asked} GPUs"
        if strategy.is_flexible:
            return f"no partition has several types of GPU and a node with {strategy.gpus}"
        return f"no node has {strategy.gpus} GPUs of one type"

    def to_json(self) -> dict[str, Any]:
        """Return plain data; all that changes from one moment to the next is under keys that begin with `now`."""
        return {
            "schema_version": 1,
            "cluster": {"name": self.cluster, "slurm_version": self.version},
            "now_asked_at": self.asked_at,
            "requests": [_as_data(each) for each in self.ranked],
            "refused": [_as_data(each) for each in self.refused],
            "not_asked": [_planned_as_data(planned) for planned in self.not_asked],
            "impossible": [
                {"partition": each.shape.partition.name, "request": str(each.shape), "why": each.why}
                for each in self.impossible
            ],
            "strategies": [
                {
                    "name": followed.strategy.name,
                    "claim": followed.strategy.claim,
                    "options": list(followed.ranked.planned.request.options()) if followed.ranked else None,
                    "why_not": followed.why_not,
                }
                for followed in self.strategies()
            ],
            "notes": list(self.notes),
        }


def rank(found: Sequence[tuple[PlannedRequest, Wait]]) -> tuple[Ranked, ...]:
    """Return requests that Slurm takes, the soonest finished first.

    Of those that finish about as soon as the soonest, the one with the fewest GPUs and nodes comes first. Requests of
    unknown finish come last, by their wait, the time of a step, and where that is not known, the most GPUs of a node.
    """
    ranked = [Ranked(planned=planned, wait=wait) for planned, wait in found if wait.refused is None]
    soonest = min((each.finish_s for each in ranked if each.finish_s is not None), default=0.0)
    return tuple(sorted(ranked, key=lambda each: _order(each, soonest)))


def refused(found: Sequence[tuple[PlannedRequest, Wait]]) -> tuple[Ranked, ...]:
    """Return requests that Slurm would not take."""
    return tuple(Ranked(planned=planned, wait=wait) for planned, wait in found if wait.refused is not None)


def run_s(planned: PlannedRequest) -> float:
    """Return the seconds of a run, infinite where they are not known."""
    return math.inf if planned.run is None else planned.run.run_s


def step_s(planned: PlannedRequest) -> float:
    """Return the seconds of a step, infinite where they are not known."""
    estimate = planned.plan.estimate
    return math.inf if estimate is None or estimate.time is None else estimate.time.step_s


def whole_minutes(seconds: float | None) -> float:
    """Return a time to the minute, as finely as waits are known; one that is not known is infinite."""
    return math.inf if seconds is None else round(seconds / WHOLE_S)


def _order(ranked: Ranked, soonest_s: float) -> tuple[object, ...]:
    planned, wait, finish_s = ranked.planned, ranked.wait, ranked.finish_s
    shape = planned.shape
    size = (shape.gpus, shape.nodes, shape.is_flexible)
    name = (shape.partition.name, str(shape))
    if finish_s is None:
        return (2, whole_minutes(wait.wait_s), step_s(planned), shape.nodes, -shape.gpus, shape.is_flexible, *name)
    if finish_s <= max(soonest_s * (1 + SAME_FINISH), soonest_s + WHOLE_S):
        return (0, *size, finish_s, *name)
    return (1, whole_minutes(finish_s), *size, *name)


def _as_data(ranked: Ranked) -> dict[str, Any]:
    wait = ranked.wait
    return _planned_as_data(ranked.planned) | {
        "now_wait_s": wait.wait_s,
        "now_told_wait_s": wait.told_s,
        "now_finish_s": ranked.finish_s,
        "now_nodes": wait.nodes,
        "now_wait_reason": wait.reason,
        "refused": wait.refused,
    }


def _planned_as_data(planned: PlannedRequest) -> dict[str, Any]:
    layout, estimate = planned.plan.layout, planned.plan.estimate
    run, fastest = planned.run, planned.fastest
    return {
        "request": planned.request.to_json(),
        "choices": {key: {"value": c.value, "reason": c.reason} for key, c in sorted(planned.choices.items())},
        "gpus": planned.gpus,
        "jobs": planned.jobs,
        "layout": {
            "strategy": layout.strategy,
            "offload": layout.offload,
            "precision": layout.precision,
            "micro_batch_size": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
            "ranks": layout.ranks,
            "global_batch_size": layout.global_batch_size,
        },
        "run": None
        if run is None
        else {"kind": "estimate", "run_s": run.run_s, "low_s": run.low_s, "high_s": run.high_s},
        "fastest_run_s": None if fastest is None else fastest.run_s,
        "gpu_hours": None if run is None else run.gpu_hours,
        "not_estimated": planned.plan.no_estimate or (estimate.no_time if estimate else None),
    }

"""What the results lines of one strategy come to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.evaluate.statistics import PairedDifference, mcnemar, paired, wilson

Record = Mapping[str, Any]
"""One results line, as `Episode.record` makes it."""


@dataclass(frozen=True)
class Metrics:
    """Means over the questions of one strategy."""

    questions: int
    correct: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    """The 95 % interval."""
    avg_cost: float
    avg_iterations: float
    avg_retrievals: float
    unparsable: int
    """Answers that could not be read; they count as wrong."""
    avg_f1: float | None
    """Of short answers."""
    gold_retrieved: float | None
    """Share of the questions with known gold passages for which one was retrieved."""
    new_tokens: int
    seconds: float | None
    """Mean of a question, from its first step to its last."""


@dataclass(frozen=True)
class StrategyComparison:
    """Two strategies on the same questions, the first less the second."""

    first: str
    second: str
    accuracy: PairedDifference
    cost: PairedDifference
    iterations: float
    only_first_correct: int
    only_second_correct: int
    p: float
    """Of McNemar's exact test."""


def metrics(records: Sequence[Record]) -> Metrics:
    """Return the means over `records`, which must not be empty."""
    correct = sum(record["is_correct"] for record in records)
    low, high = wilson(correct, len(records))
    return Metrics(
        questions=len(records),
        correct=correct,
        accuracy=correct / len(records),
        accuracy_low=low,
        accuracy_high=high,
        avg_cost=_mean(record["total_cost"] for record in records),
        avg_iterations=_mean(record["iterations"] for record in records),
        avg_retrievals=_mean(record["num_retrievals"] for record in records),
        unparsable=sum(record["unparsable"] for record in records),
        avg_f1=_known_mean(record["f1"] for record in records),
        gold_retrieved=_known_mean(record["gold_retrieved"] for record in records),
        new_tokens=sum(record["new_tokens"] for record in records),
        seconds=_known_mean(record["seconds"] for record in records),
    )


def by_difficulty(records: Sequence[Record]) -> dict[str, Metrics]:
    """Return the metrics of each difficulty there is."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record["difficulty"] is not None:
            groups.setdefault(record["difficulty"], []).append(record)
    return {difficulty: metrics(group) for difficulty, group in sorted(groups.items())}


def compare(first: Sequence[Record], second: Sequence[Record], *, seed: int) -> StrategyComparison:
    """Return how two strategies differ, question by question; both must have answered the same ones."""
    others = {record["question_id"]: record for record in second}
    pairs = [(record, others.pop(record["question_id"])) for record in first]
    assert not others, "strategies are compared on the same questions"
    only_first = sum(one["is_correct"] and not other["is_correct"] for one, other in pairs)
    only_second = sum(other["is_correct"] and not one["is_correct"] for one, other in pairs)

    def columns(key: str) -> tuple[list[float], list[float]]:
        return [float(one[key]) for one, _ in pairs], [float(other[key]) for _, other in pairs]

    return StrategyComparison(
        first=first[0]["strategy"],
        second=second[0]["strategy"],
        accuracy=paired(*columns("is_correct"), seed=seed),
        cost=paired(*columns("total_cost"), seed=seed),
        iterations=_mean_difference(*columns("iterations")),
        only_first_correct=only_first,
        only_second_correct=only_second,
        p=mcnemar(only_first, only_second),
    )


def _mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the mean of the differences."""
    return _mean(one - other for one, other in zip(first, second, strict=True))


def _mean(numbers: Iterable[float]) -> float:
    # fsum: the same to the last digit whatever order the workers finished in.
    values = list(numbers)
    return math.fsum(values) / len(values)


def _known_mean(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return _mean(known) if known else None

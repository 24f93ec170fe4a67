"""The two results files of the guide, and the table that it prints: keys and columns are its own, ours come after."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.evaluate.metrics import Record, StrategyComparison, by_difficulty, compare, metrics
from trainwright.evaluate.policies import Fixed, PolicyEntry


@dataclass(frozen=True)
class Heading:
    """What a results file says of the run as a whole."""

    timestamp: str
    """ISO 8601."""
    model: str
    gpu_mode: str
    gpu_ids: tuple[int, ...]
    difficulty: str
    seed: int
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further facts that are worth keeping: the decision process, the retriever, baselines, doubles."""


@dataclass(frozen=True)
class StrategyResults:
    """A strategy with its results lines, in the order of the questions."""

    strategy: PolicyEntry
    records: Sequence[Record]


def run_document(heading: Heading, outcome: StrategyResults) -> dict[str, Any]:
    """Return the results file of one strategy."""
    return {
        **_top(heading),
        "config": _config(heading, len(outcome.records)),
        "metrics": _figures(outcome.records),
        "results": list(outcome.records),
        "strategy": outcome.strategy.name,
        **heading.extra,
    }


def comparison_document(heading: Heading, outcomes: Sequence[StrategyResults]) -> dict[str, Any]:
    """Return the results file of several strategies on the same questions; the first is compared with each other."""
    first, second = outcomes[0], outcomes[1]
    fixed = [outcome.strategy.policy.k for outcome in outcomes if isinstance(outcome.strategy.policy, Fixed)]
    families = Counter(outcome.strategy.family for outcome in outcomes)
    names = [
        outcome.strategy.family if families[outcome.strategy.family] == 1 else outcome.strategy.slug
        for outcome in outcomes
    ]
    comparisons = compare_all(outcomes, seed=heading.seed)
    return {
        **_top(heading),
        "config": {**_config(heading, len(first.records)), "fixed_k": fixed[0] if fixed else None},
        **{
            f"{name}_strategy": {**_figures(outcome.records), "results": list(outcome.records)}
            for name, outcome in zip(names, outcomes, strict=True)
        },
        "improvement": {
            "accuracy": metrics(first.records).accuracy - metrics(second.records).accuracy,
            "cost": metrics(first.records).avg_cost - metrics(second.records).avg_cost,
        },
        "comparisons": [dataclasses.asdict(comparison) for comparison in comparisons],
        **heading.extra,
    }


def compare_all(outcomes: Sequence[StrategyResults], *, seed: int) -> list[StrategyComparison]:
    """Return the first outcome compared with each of the others."""
    return [compare(outcomes[0].records, other.records, seed=seed) for other in outcomes[1:]]


def table(outcomes: Sequence[StrategyResults], *, seed: int, width: int | None = None) -> str:
    """Return the guide's table of results in plain text, with what makes its figures worth trusting below.

    Where it is wider than `width`, the columns that are not the guide's follow as lines.
    """
    rows: list[tuple[str, ...]] = [
        ("Strategy", "Accuracy", "Avg Cost", "Avg Iterations", "Unparsable", "95 % interval")
    ]
    rows += [_row(outcome) for outcome in outcomes]
    comparisons = compare_all(outcomes, seed=seed)
    if comparisons:
        best = comparisons[0]
        improvement = ("Improvement", f"{best.accuracy.mean:+.1%}", f"{best.cost.mean:+.3f}", f"{best.iterations:+.2f}")
        rows.append((*improvement, "", ""))
    lines = aligned(rows)
    apart = []
    if width is not None and max(map(len, lines)) > width:
        lines = aligned([row[:4] for row in rows])
        apart = [f"{row[0]}: {row[4]} unparsable, 95 % interval {row[5]}" for row in rows[1 : len(outcomes) + 1]]
    rule = "-" * max(map(len, lines))
    title = "COMPARISON RESULTS" if comparisons else "RESULTS"
    body = [title, lines[0], rule, *lines[1 : len(outcomes) + 1]]
    if comparisons:
        body += [rule, lines[-1]]
    return "\n".join([*body, *apart, *map(_sentence, comparisons)])


def _row(outcome: StrategyResults) -> tuple[str, ...]:
    figures = metrics(outcome.records)
    return (
        outcome.strategy.name,
        f"{figures.accuracy:.1%} ({figures.correct}/{figures.questions})",
        f"{figures.avg_cost:.3f}",
        f"{figures.avg_iterations:.2f}",
        str(figures.unparsable),
        f"{figures.accuracy_low:.1%} - {figures.accuracy_high:.1%}",
    )


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines whose columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _sentence(comparison: StrategyComparison) -> str:
    accuracy, cost = comparison.accuracy, comparison.cost
    return (
        f"{comparison.first} against {comparison.second}: accuracy {accuracy.mean:+.1%} "
        f"[{accuracy.low:+.1%}, {accuracy.high:+.1%}], McNemar p = {comparison.p:.3g}; "
        f"cost {cost.mean:+.3f} [{cost.low:+.3f}, {cost.high:+.3f}]"
    )


def _top(heading: Heading) -> dict[str, Any]:
    return {
        "timestamp": heading.timestamp,
        "model": heading.model,
        "gpu_mode": heading.gpu_mode,
        "gpu_ids": list(heading.gpu_ids),
    }


def _config(heading: Heading, questions: int) -> dict[str, Any]:
    return {"n_questions": questions, "difficulty": heading.difficulty, "seed": heading.seed}


def _figures(records: Sequence[Record]) -> dict[str, Any]:
    figures = dataclasses.asdict(metrics(records))
    first = {key: figures.pop(key) for key in ("accuracy", "avg_cost", "avg_iterations")}
    groups = {name: dataclasses.asdict(group) for name, group in by_difficulty(records).items()}
    return {**first, **figures, "by_difficulty": groups}

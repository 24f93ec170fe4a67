"""Accuracy against cost: the decision process at several weights of cost, and the other policies beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import not_installed
from trainwright.evaluate.documents import StrategyResults, aligned
from trainwright.evaluate.eval_config import DEFAULT_FIXED_K, EvalConfig
from trainwright.evaluate.mdp import DecisionProcess
from trainwright.evaluate.metrics import metrics
from trainwright.evaluate.policies import Greedy, PolicyEntry

WEIGHTS = ("0.1", "0.3", "0.6", "1", "2", "4")
"""The values of mu that are taken where none is named, as they are spelled."""
FORMATS = ("png", "svg")


@dataclass(frozen=True)
class PolicyPoint:
    """One policy on the plane of cost and accuracy, as measured."""

    policy: str
    mu: float | None
    """Of the run's decision process; None for every other policy."""
    accuracy: float
    low: float
    high: float
    """Wilson's 95 % interval of the accuracy."""
    avg_cost: float


def with_frontier(asked: EvalConfig, weights: Sequence[str]) -> EvalConfig:
    """Return the evaluation with the decision process at each weight besides its own policies, or the fixed one."""
    others = asked.policies or [f"fixed:{DEFAULT_FIXED_K}"]
    added = [name for name in (f"mdp:mu={weight}" for weight in dict.fromkeys(weights)) if name not in others]
    return asked.model_copy(update={"policies": [*added, *others]})


def frontier(outcomes: Sequence[StrategyResults], process: DecisionProcess) -> list[PolicyPoint]:
    """Return a point for each policy, the frontier's first, from the cheapest weight on; none without a frontier.

    There is one where the run's process was followed at two weights of cost or more.
    """
    points = [_point(outcome, process) for outcome in outcomes]
    weights = {point.mu for point in points if point.mu is not None}
    if len(weights) < 2:
        return []
    return sorted(points, key=lambda point: (point.mu is None, point.mu or 0.0))


def frontier_table(points: Sequence[PolicyPoint]) -> list[str]:
    """Return the points as lines of text."""
    rows = [("Policy", "mu", "Avg Cost", "Accuracy", "95 % interval")]
    for point in points:
        mu = "" if point.mu is None else f"{point.mu:g}"
        interval = f"{point.low:.1%} - {point.high:.1%}"
        rows.append((point.policy, mu, f"{point.avg_cost:.3f}", f"{point.accuracy:.1%}", interval))
    return ["FRONTIER", *aligned(rows)]


def plot_frontier(points: Sequence[PolicyPoint], results: Path, title: str) -> list[Path]:
    """Draw accuracy against mean cost beside the results file, as .png and .svg, and return the files.

    Raises:
        UserError: matplotlib is missing (exit code 4).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise not_installed("the plot", "matplotlib", extra="report", instead="take the figures above") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="mean cost of a question", ylabel="accuracy, with Wilson's 95 % interval")
    axes.set_title(title, parse_math=False)
    ours = [point for point in points if point.mu is not None]
    axes.errorbar(
        [point.avg_cost for point in ours],
        [point.accuracy for point in ours],
        yerr=_bars(ours),
        marker="o",
        capsize=3,
        label="mdp, by mu",
    )
    weights: dict[tuple[float, float], list[str]] = {}
    for point in ours:
        weights.setdefault((point.avg_cost, point.accuracy), []).append(f"{point.mu:g}")
    for place, names in weights.items():
        axes.annotate(", ".join(names), place, textcoords="offset points", xytext=(6, 6))
    for point, marker in zip([other for other in points if other.mu is None], "s^Dv<>pP*X" * len(points), strict=False):
        bars = _bars([point])
        axes.errorbar(point.avg_cost, point.accuracy, yerr=bars, marker=marker, ls="", capsize=3, label=point.policy)
    axes.grid(alpha=0.3)
    axes.margins(0.15)
    figure.legend(loc="outside right upper")
    paths = [results.with_suffix(f".frontier.{suffix}") for suffix in FORMATS]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def _point(outcome: StrategyResults, process: DecisionProcess) -> PolicyPoint:
    figures = metrics(outcome.records)
    mu = outcome.strategy.process.mu if _is_on_the_frontier(outcome.strategy, process) else None
    return PolicyPoint(
        outcome.strategy.name, mu, figures.accuracy, figures.accuracy_low, figures.accuracy_high, figures.avg_cost
    )


def _is_on_the_frontier(strategy: PolicyEntry, process: DecisionProcess) -> bool:
    return isinstance(strategy.policy, Greedy) and dataclasses.replace(strategy.process, mu=process.mu) == process


def _bars(points: Sequence[PolicyPoint]) -> tuple[list[float], list[float]]:
    """Return how far each interval reaches below and above its point."""
    return [point.accuracy - point.low for point in points], [point.high - point.accuracy for point in points]

"""What the user sees: before a run what was chosen and why, during it how far it is, after it the figures."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainwright.evaluate.claims import claims
from trainwright.evaluate.documents import StrategyResults, table
from trainwright.evaluate.eval_config import ESTIMATED
from trainwright.evaluate.metrics import Record, by_difficulty, metrics
from trainwright.evaluate.preparing import Prepared
from trainwright.evaluate.questions.question import QuestionSet, constant_baselines
from trainwright.evaluate.replicas import ReplicaSet
from trainwright.launch.run_output import tell

PLACES_SHOWN = 5
LINES_WITHOUT_TERMINAL = 10
"""How often progress is told where nothing can be redrawn."""


def choice_lines(prepared: Prepared, spread: ReplicaSet) -> list[str]:
    """Return what was decided, each with its reason."""
    choices = {**prepared.choices, "gpu_mode": spread.mode, "dtype": spread.dtype}
    lines = [f"Results: {prepared.results}"]
    lines += [f"  {key} = {choice.value}  ({choice.reason})" for key, choice in sorted(choices.items())]
    lines.append(f"  workers = {len(spread.replicas)}  ({', '.join(replica.label for replica in spread.replicas)})")
    if prepared.retrieval is not None:
        lines.append(f"  retrieval = {prepared.retrieval['method']} over {prepared.retrieval['passages']:,} passages")
    return lines + list(_threshold_lines(prepared))


def _threshold_lines(prepared: Prepared) -> Iterator[str]:
    for strategy in prepared.strategies:
        if strategy.solution is not None:
            thresholds = strategy.solution.thresholds()
            shape = (
                "the optimal policy has this shape"
                if not thresholds.departures
                else f"the optimal policy departs from them in {len(thresholds.departures)} states"
            )
            estimated = prepared.asked.process == ESTIMATED and strategy.process == prepared.process
            assumed = "p_s and gains are estimated" if estimated else "p_s and gains are assumed, not estimated"
            yield (
                f"  {strategy.name}: theta_cont = {thresholds.theta_cont:g}, theta* = {thresholds.theta_star:g}  "
                f"({shape}; {assumed})"
            )


def data_lines(everything: QuestionSet) -> list[str]:
    """Return what to know about the data: counts, repeats, constant answers, and odd questions by kind."""
    places: dict[str, list[str]] = {}
    for remark in everything.remarks:
        places.setdefault(remark.what, []).append(remark.where)
    lines = everything.report()[: -len(everything.remarks) or None]
    for what, where in places.items():
        more = len(where) - PLACES_SHOWN
        shown = ", ".join(where[:PLACES_SHOWN]) + (f" and {more} more (all are in the results)" if more > 0 else "")
        lines.append(f"{what}: {shown}")
    return lines


def result_lines(prepared: Prepared, outcomes: Sequence[StrategyResults]) -> list[str]:
    """Return the guide's table, and below it what makes its figures worth trusting."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = table(outcomes, seed=prepared.asked.seed, width=width).splitlines()
    for difficulty, baseline in constant_baselines(prepared.questions).items():
        lines.append(
            f"always answering {baseline.answer} is right in {baseline.accuracy:.1%} of the {baseline.questions:,} "
            f"{difficulty or 'questions'} asked"
        )
    for outcome in outcomes:
        lines += _details(outcome.strategy.name, outcome.records)
    for claim in claims(prepared.asked.model, prepared.difficulty, len(prepared.questions), prepared.strategies):
        lines.append(f"claimed by the guide, not measured here: {claim}")
    return lines


def _details(name: str, records: Sequence[Record]) -> Iterator[str]:
    groups = by_difficulty(records)
    if len(groups) > 1:
        figures = ", ".join(
            f"{difficulty} {group.accuracy:.1%} ({group.correct}/{group.questions})"
            for difficulty, group in groups.items()
        )
        yield f"{name} by difficulty: {figures}"
    totals = metrics(records)
    rates = [f"{totals.avg_retrievals:.2f} retrievals a question"]
    if totals.gold_retrieved is not None:
        rates.append(f"the gold passage found in {totals.gold_retrieved:.1%}")
    if totals.avg_f1 is not None:
        rates.append(f"F1 {totals.avg_f1:.3f}")
    rates.append(f"{totals.new_tokens:,} new tokens")
    if totals.seconds is not None:
        rates.append(f"{totals.seconds:.2f} s from a question's first step to its last")
    yield f"{name}: {', '.join(rates)}"


class Answering:
    """How many questions are answered: a bar on a terminal, else a line each tenth."""

    def __init__(self, done: int, total: int) -> None:
        self.already, self.done, self.total = done, done, total
        self._started_s = time.monotonic()
        self._printed = done
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("answered"), MofNCompleteColumn(), BarColumn(16), TimeRemainingColumn(compact=True))
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar = self._progress.add_task("", total=total, completed=done)

    def __enter__(self) -> Answering:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def one_more(self) -> None:
        """Note an answer."""
        self.done += 1
        if self._progress is not None:
            self._progress.update(self._bar, completed=self.done)
        elif (self.done - self._printed) * LINES_WITHOUT_TERMINAL >= self.total or self.done == self.total:
            self._printed = self.done
            tell(f"answered {self.done:,}/{self.total:,}")

    def pace(self, ready_s: float) -> str:
        """Return what this session did since `ready_s`, when the first model was loaded."""
        now_s, answers = time.monotonic(), self.done - self.already
        return (
            f"measured: {answers:,} answers in {now_s - ready_s:.1f} s, {answers / (now_s - ready_s):.2f} a second, "
            f"after {ready_s - self._started_s:.1f} s of loading"
        )

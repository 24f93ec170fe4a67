"""`trainwright eval`: one command that starts an evaluation, goes on with it, or shows that it is finished."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.claims import claims
from trainwright.evaluate.console import Answering, choice_lines, data_lines, result_lines
from trainwright.evaluate.documents import Heading, StrategyResults, comparison_document, run_document
from trainwright.evaluate.engines.engine import EngineSettings
from trainwright.evaluate.estimating import Estimated, estimate_process
from trainwright.evaluate.eval_checks import EvalCheck, require, run_checks
from trainwright.evaluate.eval_config import ESTIMATED, EvalConfig, RetrievalSection
from trainwright.evaluate.frontier import PolicyPoint, frontier, frontier_table, plot_frontier
from trainwright.evaluate.preparing import Prepared, prepare_calibration, prepare_evaluation
from trainwright.evaluate.questions.question import constant_baselines
from trainwright.evaluate.replicas import ReplicaSet, spread
from trainwright.evaluate.results import Collected, Key, write_results
from trainwright.evaluate.worker_pool import WORKER_MODULE, Crew, Worker
from trainwright.hardware.local import local_inventory
from trainwright.launch.run_output import tell
from trainwright.launch.supervision import StopAsked
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.writing import plain

_COMMAND = (sys.executable, "-m", WORKER_MODULE)
AT_ONCE_ON_CPU, AT_ONCE_ON_GPU = 64, 256
"""Questions that a worker has open where the batch size is left open; a kill costs no more than these."""


@dataclass(frozen=True)
class Finished:
    """What an evaluation came to."""

    prepared: Prepared
    outcomes: tuple[StrategyResults, ...]
    document: Mapping[str, Any]
    """The results file."""

    def lines(self) -> list[str]:
        """Return the figures as they are printed."""
        lines = result_lines(self.prepared, self.outcomes)
        points = frontier(self.outcomes, self.prepared.process)
        return [*lines, *frontier_table(points)] if points else lines

    def summary(self) -> dict[str, Any]:
        """Return the results file without the single questions, and where it lies."""
        figures = {
            key: {name: figure for name, figure in value.items() if name != "results"}
            if isinstance(value, dict)
            else value
            for key, value in self.document.items()
            if key != "results"
        }
        summary: dict[str, Any] = plain({"schema_version": 1, "results_file": self.prepared.results, **figures})
        return summary


@dataclass(frozen=True)
class DryRun:
    """What an evaluation would start."""

    prepared: Prepared
    spreading: ReplicaSet
    checks: list[EvalCheck]

    def lines(self) -> list[str]:
        """Return each worker's command, for a shell."""
        return [
            " ".join(f"{key}={shlex.quote(value)}" for key, value in replica.environment.items())
            + f" {shlex.join(_COMMAND)} SOCKET"
            for replica in self.spreading.replicas
        ]

    def summary(self) -> dict[str, Any]:
        """Return what was chosen and checked, and each worker's command with the environment it adds."""
        return {
            "schema_version": 1,
            "results_file": str(self.prepared.results),
            "policies": [strategy.name for strategy in self.prepared.strategies],
            "questions": len(self.prepared.questions),
            "choices": _choices(self.prepared, self.spreading),
            "checks": [asdict(check) for check in self.checks],
            "workers": [
                {"label": replica.label, "environment": dict(replica.environment), "command": [*_COMMAND, "SOCKET"]}
                for replica in self.spreading.replicas
            ],
        }


def evaluate(
    asked: EvalConfig, *, fresh: bool = False, dry_run: bool = False, show_data: bool = True
) -> Finished | DryRun | ExitCode:
    """Bring an evaluation to its end, or return with what exit code it stopped before.

    Raises:
        UserError: it cannot start, or a worker failed; what was answered is kept.
    """
    estimating = asked.process == ESTIMATED
    prepared = prepare_calibration(asked) if estimating else prepare_evaluation(asked)
    inventory = local_inventory()
    spreading = spread(asked, inventory, length=prepared.tokens)
    for line in [*choice_lines(prepared, spreading), *(data_lines(prepared.everything) if show_data else ())]:
        tell(line)
    checks = run_checks(asked, inventory, spreading)
    for check in checks:
        tell(str(check))
    require(checks)
    if dry_run:
        return DryRun(prepared, spreading, checks)
    stop, estimated = StopAsked(), None
    with stop.listening():
        if estimating:
            if _answered(prepared, spreading, stop, fresh=fresh) is None:
                return ExitCode.STOPPED
            estimated = _estimated(prepared)
            prepared = prepare_evaluation(asked, estimated.process)
            spreading = spread(asked, inventory, length=prepared.tokens)
            for line in [*estimated.lines(), *choice_lines(prepared, spreading)]:
                tell(line)
        notes = _answered(prepared, spreading, stop, fresh=fresh)
        return ExitCode.STOPPED if notes is None else _finish(prepared, spreading, notes, estimated)


def _answered(prepared: Prepared, spreading: ReplicaSet, stop: StopAsked, *, fresh: bool) -> list[str] | None:
    """Have every question answered; return what the engines said of their choices, None if it was stopped before."""
    lines = prepared.lines
    lines.folder.mkdir(parents=True, exist_ok=True)
    with RunLock(RunFolder(lines.folder.resolve())):
        if fresh:
            lines.forget()
        lines.begin(prepared.settings(spreading.dtype.value))
        notes = _answer(prepared, spreading, stop)
    if not stop.times:
        return notes
    answered, total = len(_keys(prepared)) - len(_open(prepared)), len(_keys(prepared))
    tell(f"stopped with {answered:,} of {total:,} answered; run the same command to go on")
    return None


def _estimated(prepared: Prepared) -> Estimated:
    (probe,) = prepared.strategies
    questions = {question.id: question for question in prepared.questions}
    return estimate_process(prepared.lines.collect().of(probe.name, questions), questions, prepared.process)


def _keys(prepared: Prepared) -> list[Key]:
    # One question's prompts are alike under every policy: side by side they share what was computed.
    return [(strategy.name, question.id) for question in prepared.questions for strategy in prepared.strategies]


def _open(prepared: Prepared) -> list[Key]:
    done = prepared.lines.collect().records
    return [key for key in _keys(prepared) if key not in done]


def _answer(prepared: Prepared, spreading: ReplicaSet, stop: StopAsked) -> list[str]:
    """Have the open questions answered by workers; return what their engines said of their choices."""
    keys = _open(prepared)
    total = len(_keys(prepared))
    if not keys:
        tell(f"All {total:,} are answered already (`--fresh` asks again)")
        return []
    if len(keys) < total:
        tell(f"Going on: {total - len(keys):,} of {total:,} are answered already")
    workers = [_worker(prepared, spreading, number) for number in range(min(len(spreading.replicas), len(keys)))]
    crew = Crew(workers, keys, {question.id: question for question in prepared.questions})
    with Answering(total - len(keys), total) as progress:
        crew.run(stopped=lambda: stop.times > 0, answered=lambda key: progress.one_more())
    if not stop.times:
        assert crew.ready_s is not None
        tell(progress.pace(crew.ready_s))
    return crew.notes


def _worker(prepared: Prepared, spreading: ReplicaSet, number: int) -> Worker:
    asked, replica = prepared.asked, spreading.replicas[number]
    settings = EngineSettings(
        model=asked.model,
        revision=asked.revision,
        devices=replica.placement,
        engine=asked.engine,  # type: ignore[arg-type]  # or a class of the user's own, which the worker opens itself
        dtype=spreading.dtype.value,  # type: ignore[arg-type]
        batch_size=asked.batch_size,
        chat_template=asked.chat_template,
        processes=1 if spreading.on_cuda else len(spreading.replicas),
        seed=asked.seed,
    )
    at_once = AT_ONCE_ON_GPU if spreading.on_cuda else AT_ONCE_ON_CPU
    logs = prepared.lines.folder / "logs"
    logs.mkdir(mode=0o700, exist_ok=True)
    begin = {
        "engine": settings.to_json(),
        "process": asdict(prepared.process),
        "strategies": [strategy.name for strategy in prepared.strategies],
        "retrieval": prepared.retrieval,
        "passages": asked.retrieval.k if isinstance(asked.retrieval, RetrievalSection) else 0,
        "success": asked.retrieval.success if isinstance(asked.retrieval, RetrievalSection) else "new",
        "prompt_template": asked.prompt_template,
        "max_new_tokens": asked.max_new_tokens,
        "seed": asked.seed,
        "at_once": at_once if asked.batch_size == "auto" else asked.batch_size,
        "results": str(prepared.results),
        "writer": f"worker-{number}",
    }
    return Worker(begin, replica.environment, logs / f"worker-{number}.log")


def _finish(prepared: Prepared, spreading: ReplicaSet, notes: list[str], estimated: Estimated | None) -> Finished:
    """Write the results file from the lines."""
    collected = prepared.lines.collect()
    if collected.doubles:
        tell(f"{len(collected.doubles)} questions were answered twice; the earlier answer counts")
    names = [question.id for question in prepared.questions]
    outcomes = tuple(StrategyResults(one, collected.of(one.name, names)) for one in prepared.strategies)
    points = frontier(outcomes, prepared.process)
    heading = Heading(
        timestamp=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        model=prepared.asked.model,
        gpu_mode=spreading.mode.value,
        gpu_ids=spreading.gpu_ids,
        difficulty=prepared.difficulty,
        seed=prepared.asked.seed,
        extra={
            **_facts(prepared, spreading, collected, notes, estimated),
            "frontier": [asdict(point) for point in points],
        },
    )
    document = run_document(heading, outcomes[0]) if len(outcomes) == 1 else comparison_document(heading, outcomes)
    write_results(prepared.results, document)
    if points:
        _plot(points, prepared)
    return Finished(prepared, outcomes, document)


def _plot(points: list[PolicyPoint], prepared: Prepared) -> None:
    """Draw the frontier; its figures are in the results with or without the plot."""
    title = f"{prepared.asked.model}, {len(prepared.questions):,} questions"
    try:
        for path in plot_frontier(points, prepared.results, title):
            tell(f"Plot: {path}")
    except UserError as error:
        tell(f"no plot: {error.message} ({error.hints[0]})")


def _choices(prepared: Prepared, spreading: ReplicaSet) -> dict[str, Any]:
    choices = {**prepared.choices, "gpu_mode": spreading.mode, "dtype": spreading.dtype}
    return {key: {"value": choice.value, "reason": choice.reason} for key, choice in choices.items()}


def _facts(
    prepared: Prepared, spreading: ReplicaSet, collected: Collected, notes: list[str], estimated: Estimated | None
) -> dict[str, Any]:
    """Return what the guide's files do not say, and a reader needs."""
    strategies = prepared.strategies
    return {
        "schema_version": 1,
        "process": asdict(prepared.process),
        "process_source": "assumed" if estimated is None else "estimated",
        "calibration": None if estimated is None else estimated.to_json(),
        "thresholds": {one.name: asdict(one.solution.thresholds()) for one in strategies if one.solution is not None},
        "retrieval": prepared.retrieval,
        "choices": _choices(prepared, spreading),
        "engine": notes,
        "baselines": [
            {"difficulty": difficulty, **asdict(baseline)}
            for difficulty, baseline in constant_baselines(prepared.questions).items()
        ],
        "remarks": [asdict(remark) for remark in prepared.everything.remarks],
        "repeats": prepared.everything.repeats(),
        "answered_twice": [list(key) for key in collected.doubles],
        "claims": [
            asdict(claim)
            for claim in claims(prepared.asked.model, prepared.difficulty, len(prepared.questions), strategies)
        ],
    }

"""Whether a run of several processes is one (S1-23, S1-24, S1-35): all take part, all GPUs work, and each does 1/N."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trainwright.job.schedule import steps_per_epoch
from trainwright.launch.own_script.starting import ScriptStart
from trainwright.plan.layout import Layout
from trainwright.runs import records
from trainwright.runs.folder import RunFolder
from trainwright.runs.writing import read_json

Level = Literal["ok", "warning", "problem"]
_SAID = re.compile(r"\bnum(?:ber of|_)? ?processes: *(\d{1,6})\b", re.IGNORECASE)
"""As accelerate's state prints it (`Num processes: 2`), and as S1-23 wants it."""
_OWN_LINES = 3
SAME_STEPS = 0.02
"""Steps an epoch agree within as much, or within one: samplers round up, or drop the last batch."""


@dataclass(frozen=True)
class ScriptCheck:
    """One question and its answer."""

    level: Level
    text: str

    def __str__(self) -> str:
        return f"check {self.level}: {self.text}"


def check_attempt(folder: RunFolder, attempt: int, layout: Layout, samples: int | None) -> list[ScriptCheck]:
    """Return the checks of an attempt that has run, and keep them among the run's events."""
    start = ScriptStart.read(folder.script_json(attempt))
    checks = [_processes(folder, start), *_gpus(folder, start)]
    seen = steps_an_epoch(folder, attempt)
    if layout.ranks > 1 or seen is not None:
        checks.append(_steps(seen, _expected(folder, layout, samples), layout))
    content = {"ranks": layout.ranks, "global_batch_size": layout.global_batch_size, "steps_per_epoch": seen}
    event = {"event": "checked", "attempt": attempt, **content, "checks": [asdict(check) for check in checks]}
    records.append(folder.events_jsonl, event)
    return checks


def _processes(folder: RunFolder, start: ScriptStart) -> ScriptCheck:
    attempt_dir = folder.attempt_dir(start.attempt)
    started = len(list(attempt_dir.glob("rank_*.started.json")))
    if started != start.ranks:
        return ScriptCheck("problem", f"processes: {started} started, {start.ranks} planned")
    joined = processes_joined(folder, start.attempt)
    if joined is None and start.ranks > 1:
        return ScriptCheck(
            "warning",
            f"processes: {started} started; whether they train together is not known: the script calls no "
            "trainwright.report and prints no `Number of processes`",
        )
    if joined not in (None, start.ranks):
        return ScriptCheck(
            "problem", f"processes: {started} started, but the script's own group is of {joined}: each trains alone"
        )
    return ScriptCheck("ok", f"processes: {started} started" + (" and joined" if start.ranks > 1 else ""))


def processes_joined(folder: RunFolder, attempt: int) -> int | None:
    """Return of how many processes the script says its group is, None where it does not say."""
    reported = folder.attempt_dir(attempt) / "reported.json"
    if reported.exists():
        processes = read_json(reported)["processes"]
        if processes is not None:
            return int(processes)
    own = folder.rank_log(attempt, 0).read_text(errors="replace").split("\n", _OWN_LINES)[_OWN_LINES:]
    said = _SAID.findall(own[0]) if own else []
    return int(said[-1]) if said else None


def _gpus(folder: RunFolder, start: ScriptStart) -> Iterator[ScriptCheck]:
    for path in sorted(folder.attempt_dir(start.attempt).glob("gpus_of_rank_*.json")):
        highest: Mapping[str, int | None] = json.loads(path.read_text())
        idle = [name for name, pct in highest.items() if pct == 0]
        unknown = [name for name, pct in highest.items() if pct is None]
        where = _node_of(path, start)
        if idle:
            yield ScriptCheck("problem", f"GPUs{where}: {', '.join(idle)} never busy while the script ran")
        elif unknown:
            yield ScriptCheck("warning", f"GPUs{where}: how busy {', '.join(unknown)} was cannot be read")
        else:
            busiest = ", ".join(f"{name} up to {pct} %" for name, pct in highest.items())
            yield ScriptCheck("ok", f"GPUs{where} busy: {busiest}")


def _node_of(path: Path, start: ScriptStart) -> str:
    if start.nodes == 1:
        return ""
    return f" of node {int(path.stem.rpartition('_')[2]) // start.ranks_per_node}"


def steps_an_epoch(folder: RunFolder, attempt: int) -> float | None:
    """Return the optimizer steps an epoch that an attempt's metrics show, None where they tell of no epoch."""
    points = [
        (record["step"], record["epoch"])
        for record in records.read(folder.metrics_jsonl)
        if record.get("attempt") == attempt and record.get("kind") == "train" and record.get("epoch")
    ]
    if not points:
        return None
    step, epoch = points[-1]
    return float(step / epoch)


def _expected(folder: RunFolder, layout: Layout, samples: int | None) -> tuple[float, str] | None:
    """Return the steps an epoch that there should be, from the data or from an attempt with another number of ranks."""
    if samples is not None:
        steps = steps_per_epoch(samples, layout.global_batch_size, drop_last=False)
        return float(steps), f"{samples:,} samples / {layout.global_batch_size}"
    for event in reversed(list(records.read(folder.events_jsonl))):
        if event.get("event") == "checked" and event["steps_per_epoch"] and event["ranks"] != layout.ranks:
            steps = event["steps_per_epoch"] * event["global_batch_size"] / layout.global_batch_size
            return steps, f"as attempt {event['attempt']} with {event['ranks']} processes"
    return None


def _steps(seen: float | None, expected: tuple[float, str] | None, layout: Layout) -> ScriptCheck:
    if seen is None:
        return ScriptCheck("warning", "steps an epoch: not known, as the metrics tell of no epoch")
    if expected is None:
        return ScriptCheck(
            "warning", f"steps an epoch: {seen:,.0f}; nothing to compare with (set data.path to a jsonl file)"
        )
    steps, basis = expected
    if _agree(seen, steps):
        return ScriptCheck("ok", f"steps an epoch: {seen:,.0f} ({basis})")
    if layout.ranks > 1 and _agree(seen, steps * layout.ranks):
        return ScriptCheck(
            "problem",
            f"steps an epoch: {seen:,.0f}, {layout.ranks} times the {steps:,.0f} of {basis}: "
            "every process goes over all of the data",
        )
    return ScriptCheck(
        "warning", f"steps an epoch: {seen:,.0f}, not the {steps:,.0f} of {basis}: the script's own batch differs"
    )


def _agree(seen: float, expected: float) -> bool:
    return abs(seen - expected) <= max(1.0, SAME_STEPS * expected)


def worst(checks: Sequence[ScriptCheck]) -> Level:
    """Return the gravest level among checks."""
    order: dict[Any, int] = {"ok": 0, "warning": 1, "problem": 2}
    return max((check.level for check in checks), key=order.__getitem__, default="ok")

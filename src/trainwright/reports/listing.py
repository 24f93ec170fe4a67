"""`trainwright runs`: the runs that the index points to, each as its own folder tells it."""

from __future__ import annotations

import datetime
import json
import re
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, get_args

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.reading import printable
from trainwright.reports.formatting import spelled
from trainwright.reports.summary import Summary, gone, summarize
from trainwright.runs import index
from trainwright.runs.folder import RunFolder
from trainwright.watch import formatting
from trainwright.watch.tables import Table
from trainwright.watch.view import RunState

SCHEMA_VERSION = 1
STATES: Final = (*get_args(RunState), "missing")
_SPANS_S: Final = {"min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def list_runs(states: Sequence[str], since: str | None, *, as_json: bool) -> None:
    """Print the runs of the index, the newest first; of these states, and begun since then, where that is asked for.

    Raises:
        UserError: a state or a time is none.
    """
    unknown = [state for state in states if state not in STATES]
    if unknown:
        raise UserError(f"no run is ever {' or '.join(unknown)}", hints=[f"--state is one of {', '.join(STATES)}"])
    since_s = None if since is None else moment(since)
    _require_home()
    chosen = [run for run in known_runs() if wanted(run, states, since_s)]
    if as_json:
        document = {"schema_version": SCHEMA_VERSION, "runs": [run.to_json() for run in chosen]}
        print(json.dumps(document, indent=2))
    elif chosen:
        print("\n".join(table(chosen).lines()))
    else:
        print(f"no such run in {index.index_file()}", file=sys.stderr)
        print("hint: trainwright runs --rebuild PATH... finds those in folders", file=sys.stderr)


def rebuild(roots: Sequence[Path]) -> None:
    """Make the index again from the run folders under `roots`, and say how many were found.

    Raises:
        UserError: a folder is not there, or the index cannot be written.
    """
    absent = [str(root) for root in roots if not root.is_dir()]
    if absent:
        raise UserError(
            f"there is no folder {' and no '.join(absent)}",
            hints=["name the folders that hold run folders: trainwright runs --rebuild PATH..."],
            exit_code=ExitCode.MISSING,
        )
    _require_home()
    try:
        locations = index.rebuild(roots)
    except OSError as error:
        message = f"{index.index_file()} cannot be written: {error.strerror}"
        raise UserError(message, exit_code=ExitCode.STORAGE) from error
    print(f"{len(locations):,} runs found; {len(index.known()):,} in {index.index_file()}", file=sys.stderr)


def _require_home() -> None:
    try:
        index.index_file()
    except RuntimeError as error:
        message = f"there is no place for the index of runs: {error}"
        raise UserError(message, hints=["set XDG_DATA_HOME to a folder of yours"]) from error


def known_runs() -> list[Summary]:
    """Return all runs of the index, the newest first; one that has left its folder says so."""
    runs = [
        summarize(RunFolder(place.path)) if place.is_there else gone(Path(place.path), place.run_id)
        for place in index.known()
    ]
    return sorted(runs, key=lambda run: run.started_s or 0.0, reverse=True)


def wanted(run: Summary, states: Collection[str], since_s: float | None) -> bool:
    """Say whether a run is in one of the states, if any are given, and began since then."""
    in_time = since_s is None or (run.started_s is not None and run.started_s >= since_s)
    return in_time and (not states or run.state in states)


def moment(text: str, now_s: float | None = None) -> float:
    """Return a moment in seconds since the epoch: `2026-11-22`, `2026-11-22T08:30`, or `36h`, `7d`, `2w` ago.

    Raises:
        UserError: it is neither.
    """
    span = re.fullmatch(r"([0-9]{1,6})(min|h|d|w)", text)
    if span:
        return (time.time() if now_s is None else now_s) - int(span[1]) * _SPANS_S[span[2]]
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        message = f"--since {printable(text)} is no moment"
        raise UserError(
            message, hints=["give a date, 2026-11-22, or a time back from now: 90min, 36h, 7d, 2w"]
        ) from None


def table(runs: Iterable[Summary]) -> Table:
    """Return the runs as rows of text."""
    columns = ("name", "state", "began", "time", "model", "strategy", "devices", "step", "loss", "folder", "")
    return Table("Runs", columns, tuple(_row(run) for run in runs))


def _row(run: Summary) -> tuple[str, ...]:
    total = f"/{run.total_steps:,}" if run.total_steps else ""
    trouble = run.meaning if run.state not in ("finished", "running") else None
    return tuple(
        printable(cell)
        for cell in (
            run.name,
            run.state,
            spelled("moment", run.started_s),
            spelled("duration", run.duration_s),
            run.model or formatting.NOT_AVAILABLE,
            run.strategy or formatting.NOT_AVAILABLE,
            run.devices or formatting.NOT_AVAILABLE,
            spelled("count", run.step) + total,
            spelled("loss", run.loss),
            run.folder,
            trouble or "",
        )
    )

"""What a user's own training script tells its run: `trainwright.report(step=10, loss=2.3)`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append

EVAL = "eval_"
"""Figures whose name starts so are of an evaluation."""

_warned = False


def report(*, step: int, **figures: float) -> None:
    """Record figures of an optimizer step in the run's metrics.jsonl: `report(step=10, loss=2.3, epoch=0.5)`.

    `loss`, `learning_rate`, `epoch`, `grad_norm`, `tokens_per_s`, `step_s` and `memory_gib` are shown by name, any
    other name is kept; `eval_loss` and its like are recorded as an evaluation's. Numbers of any library will do, also
    tensors of one element. Call it from every rank or from the first: only the first records. Outside a run of
    `trainwright train` it does nothing; where the disk fails it warns once and never raises.
    """
    run_dir, attempt = os.environ.get("TRAINWRIGHT_RUN_DIR"), os.environ.get("TRAINWRIGHT_ATTEMPT")
    if run_dir is None or attempt is None or os.environ.get("RANK", "0") != "0":
        return
    folder = RunFolder(run_dir)
    try:
        _say_who_reports(folder.attempt_dir(int(attempt)) / "reported.json")
        for record in step_records(step, figures):
            append(folder.metrics_jsonl, {"attempt": int(attempt), "source": "trainwright.report", **record})
    except (OSError, TypeError, ValueError) as error:
        _warn_once(error)


def step_records(step: int, figures: Mapping[str, float]) -> list[dict[str, object]]:
    """Return the records of one step: of training, of an evaluation, or both."""
    trained = {name: value for name, value in figures.items() if not name.startswith(EVAL)}
    evaluated = {name.removeprefix(EVAL): value for name, value in figures.items() if name.startswith(EVAL)}
    if evaluated and trained.keys() <= {"epoch"}:
        return [{"kind": "eval", "step": step, **trained, **evaluated}]
    records: list[dict[str, object]] = [{"kind": "train", "step": step, **trained}]
    return [*records, {"kind": "eval", "step": step, **evaluated}] if evaluated else records


def _say_who_reports(path: Path) -> None:
    """Leave word, once, that the log need not be read, and of how many processes the script's group is.

    torch is looked at only where the script has it loaded.
    """
    if path.exists():
        return
    processes = None
    if distributed := sys.modules.get("torch.distributed"):
        joined = distributed.is_available() and distributed.is_initialized()
        processes = distributed.get_world_size() if joined else 1
    path.write_text(json.dumps({"processes": processes}))


def _warn_once(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        print(f"warning: trainwright.report could not record a step (said once): {error}", file=sys.stderr)

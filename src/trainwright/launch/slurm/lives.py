"""The lives of a run's jobs: each start of one, and whether it brought a new checkpoint."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Final

from trainwright.errors import ExitCode, UserError
from trainwright.job.schema import Job
from trainwright.launch.own_script.checkpoints import newest_checkpoint
from trainwright.runs.checkpoints import CorruptCheckpoint, read_manifest
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append, read

MOST_LIVES: Final = 3
"""Lives that may bring no new checkpoint, one after the other."""


def begin_life(folder: RunFolder, job: Job, job_id: str, restarts: int) -> None:
    """Write down that a life begins, with what was saved before it."""
    life = {"job_id": job_id, "restarts": restarts, "time_s": time.time(), "saved": _newest_save(folder, job)}
    append(folder.lives_jsonl, life)


def require_progress(folder: RunFolder, job: Job) -> None:
    """Refuse to go on where the last lives brought no new checkpoint, whatever ended them and however early.

    Raises:
        UserError: exit 1; with where to look.
    """
    saved, lives = _newest_save(folder, job), 0
    for life in reversed(list(read(folder.lives_jsonl))):
        if life.get("saved") != saved:
            break
        lives += 1
    if lives >= MOST_LIVES:
        raise UserError(
            f"{lives} lives of the job in a row brought no new checkpoint; another would do no better",
            hints=[
                f"look at their logs in {folder.logs_dir}",
                "where the time limit ended them: submit with a longer --time, or save more often (checkpoint.every)",
                f"then go on: trainwright resume {folder.path}",
            ],
            exit_code=ExitCode.FAILED,
        )


def _newest_save(folder: RunFolder, job: Job) -> list[Any]:
    """Return what names the newest save, as JSON gives it back.

    Of a script that leaves no checkpoint which is recognised, any new file in its output may be one.
    """
    if job.script is None:
        made = [[0, 0]]
        for _, path in folder.checkpoints():
            with suppress(CorruptCheckpoint):
                manifest = read_manifest(path)
                made.append([manifest.attempt, manifest.step])
        return max(made)
    found = newest_checkpoint(folder.output_dir)
    if found.path is not None:
        return ["checkpoint", found.step]
    files = [path.stat().st_mtime_ns for path in folder.output_dir.rglob("*") if path.is_file()]
    return ["output", max(files, default=0)]

"""Asking Slurm when a request would start, and keeping on record how long jobs really waited."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from trainwright.hardware.reading import printable
from trainwright.hardware.slurm.commands import TIMEOUT_S, run_slurm
from trainwright.plan.slurm.slurm_request import SlurmRequest
from trainwright.plan.slurm.wait import PastWait, Wait, expected_wait
from trainwright.runs import records
from trainwright.runs.user_data import user_data_dir

LARGEST_FILE_BYTES: Final = 2**20
"""Some five thousand waits; the file then becomes `slurm_waits.old.jsonl`, and the one before is gone."""
_STARTS: Final = re.compile(r"Job \d+ to start at (?P<start>\S+) using \d+ processors on nodes (?P<nodes>\S+)")
_REFUSES: Final = re.compile(r"(?:allocation failure|sbatch: error): (?P<why>.+)")


def ask_wait(request: SlurmRequest, cluster: str, past: Iterable[PastWait]) -> Wait:
    """Return the wait of a request as `sbatch --test-only` tells it now, corrected by earlier waits.

    Nothing is submitted; each question uses up a job id of the cluster.

    Raises:
        UserError: exit 4; there is no Slurm, or it does not answer.
    """
    # Also the environment is the submission's own: a site's SBATCH_ACCOUNT counts for both.
    done = run_slurm("sbatch", "--test-only", *request.options(), "--wrap=true")
    return told_wait(done.stderr, done.returncode, datetime.now(), request, cluster, past)


def told_wait(
    text: str, exit_status: int, now: datetime, request: SlurmRequest, cluster: str, past: Iterable[PastWait]
) -> Wait:
    """Read what `sbatch --test-only` wrote to stderr; `now` is this machine's local time, as Slurm's is."""
    if exit_status:
        reasons = dict.fromkeys(match["why"].strip() for match in _REFUSES.finditer(text))
        why = printable("; ".join(reasons) or " ".join(text.split()) or f"exit {exit_status}")
        return Wait(wait_s=None, reason="refused", refused=why)
    match = _STARTS.search(text)
    if match is None:
        return expected_wait(request, cluster, None, None, past)
    try:
        told_s = max(0.0, (datetime.fromisoformat(match["start"]) - now).total_seconds())
    except ValueError:
        return expected_wait(request, cluster, None, None, past)
    return expected_wait(request, cluster, told_s, printable(match["nodes"]), past)


def expected_start(job_id: str, *, timeout_s: float = TIMEOUT_S) -> str | None:
    """Return when Slurm expects a waiting job to start, at the latest about; None where it does not tell.

    Raises:
        UserError: exit 4; there is no Slurm here, or it does not answer within `timeout_s`.
    """
    done = run_slurm("squeue", "--noheader", "--start", f"--jobs={job_id}", "-o", "%S", timeout_s=timeout_s)
    start = printable(done.stdout.strip())
    return None if done.returncode or start in ("", "N/A") else start


def record_wait(wait: PastWait, data_dir: Path | None = None) -> str | None:
    """Keep how long a job waited; return None, or why nothing was kept, which is no reason to end a run."""
    try:
        path = _file(data_dir)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > LARGEST_FILE_BYTES:
            path.replace(_older(path))
        records.append(path, dataclasses.asdict(wait))
    except (OSError, RuntimeError) as error:
        return f"the wait was not kept for later estimates: {error}"
    return None


def past_waits(data_dir: Path | None = None) -> tuple[PastWait, ...]:
    """Return all waits on record, one a job (its last), without lines that are torn or make no sense."""
    try:
        path = _file(data_dir)
        lines = [*records.read(_older(path)), *records.read(path)]
    except (OSError, RuntimeError):
        return ()
    found = {(wait.cluster, wait.job_id): wait for wait in _understood(lines)}
    return tuple(found.values())


def _understood(lines: Iterable[Mapping[str, Any]]) -> Iterator[PastWait]:
    for line in lines:
        try:
            wait = PastWait(**line)
        except TypeError:
            continue
        texts = (wait.job_id, wait.cluster, wait.partition, wait.gpu_type or "")
        times = (wait.told_s, wait.waited_s)
        if (
            all(isinstance(text, str) for text in texts)
            and type(wait.gpus) is int
            and all(isinstance(time, int | float) and 0 <= time < 1e9 for time in times)
        ):
            yield wait


def _file(data_dir: Path | None) -> Path:
    return (data_dir or user_data_dir()) / "slurm_waits.jsonl"


def _older(path: Path) -> Path:
    return path.with_suffix(".old.jsonl")

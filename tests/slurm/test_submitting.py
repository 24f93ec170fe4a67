"""What `submit` leaves in the queue and on record: two at once, and chains of which Slurm refuses a link."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_bed import SlurmBed

ASKED = ("--gres", "gpu:v100:1", "--time", "60")


@pytest.fixture
def full(slurm: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmBed]:
    """The cluster with its V100 taken, so that what is submitted for them stays in the queue."""
    monkeypatch.setattr(slurm, "env", slurm.env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    for node in ("v100-1", "mix-1"):
        blocker = slurm.sbatch("#!/bin/bash\nsleep 600\n", "-w", node, "--exclusive", "--mem=0", name="full")
        slurm.wait_job(blocker, ["RUNNING"])
    yield slurm


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job of a script that does nothing."""
    (tmp_path / "job.yaml").write_text(json.dumps({"name": "own", "script": ["true"], "resources": {"device": "cpu"}}))
    return tmp_path


def in_front_of_sbatch(bed: SlurmBed, folder: Path, lines: str) -> None:
    """Put a program named sbatch before the real one, which is `$REAL`; estimates (`--test-only`) pass through."""
    real = shutil.which("sbatch", path=bed.env["PATH"])
    (folder / "bin").mkdir()
    program = folder / "bin" / "sbatch"
    program.write_text(
        f'#!/bin/bash\nREAL={real}\n[ "$1" = --test-only ] && exec $REAL "$@"\n{lines}\nexec $REAL "$@"\n'
    )
    program.chmod(0o755)
    bed.env = bed.env | {"PATH": f"{folder / 'bin'}:{bed.env['PATH']}"}


def in_queue(bed: SlurmBed) -> list[str]:
    return bed.run("squeue", "--noheader", "--name=own", "-o", "%i").stdout.split()


def test_harm_11_of_two_submissions_at_once_one_is_taken(full: SlurmBed, job: Path) -> None:
    """Both begin before the first is on record: the real sbatch answers only after both have asked."""
    in_front_of_sbatch(full, job, "sleep 4")
    command = [sys.executable, "-m", "trainwright", "submit", "job.yaml", *ASKED]
    both = [
        subprocess.Popen(command, env=full.env, cwd=job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300) for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    refused = next(err for process, (_, err) in zip(both, said, strict=True) if process.returncode)
    taken = next(out.split() for process, (out, _) in zip(both, said, strict=True) if not process.returncode)
    assert "another process works on" in refused or "is in the queue" in refused
    assert in_queue(full) == taken
    assert full.trainwright("cancel", "own", cwd=job).stdout.split() == taken

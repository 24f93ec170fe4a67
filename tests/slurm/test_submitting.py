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


@pytest.mark.parametrize("word", [None, "keep", "cancel"])
def test_harm_11_a_chain_of_which_slurm_refuses_a_link_is_known_and_kept_or_cancelled(
    full: SlurmBed, job: Path, word: str | None
) -> None:
    """The third sbatch asks for a partition that is not there; what was taken before is on record and in the queue."""
    count = job / "count"
    nowhere = 'exec $REAL "${@:1:$#-1}" --partition=none "${@: -1}"'
    in_front_of_sbatch(full, job, f"echo >> {count}; [ $(wc -l < {count}) = 3 ] && {nowhere}")
    told = () if word is None else ("--if-refused", word)
    done = full.trainwright("submit", "job.yaml", *ASKED, "--chain", "4", *told, cwd=job)
    taken = done.stdout.split()
    assert done.returncode == 4 and len(taken) == 2, done.stderr
    assert "Slurm took 2 of the chain's 4 jobs" in done.stderr and "invalid partition" in done.stderr
    assert ", ".join(taken) in done.stderr
    status = json.loads(full.trainwright("status", "own", "--json", cwd=job).stdout)
    assert status["job_ids"] == taken
    if word == "cancel":
        assert in_queue(full) == []
        return
    assert (status["state"], sorted(in_queue(full))) == ("PENDING", sorted(taken))
    assert full.trainwright("cancel", "own", cwd=job).stdout.split() == taken
    assert in_queue(full) == []


def test_harm_11_each_link_is_on_record_before_the_next_is_asked_for(full: SlurmBed, job: Path) -> None:
    """A submission that is killed while the second sbatch runs leaves the first job known."""
    count, asked = job / "count", job / "asked"
    in_front_of_sbatch(full, job, f"echo >> {count}; [ $(wc -l < {count}) = 2 ] && touch {asked} && exec sleep 60")
    command = [sys.executable, "-m", "trainwright", "submit", "job.yaml", *ASKED, "--chain", "2"]
    with subprocess.Popen(command, env=full.env, cwd=job, stdout=subprocess.PIPE, text=True) as submitting:
        full.wait(asked.exists, "the second sbatch")
        submitting.kill()
    taken = in_queue(full)
    assert len(taken) == 1
    assert full.trainwright("cancel", "own", cwd=job).stdout.split() == taken
    assert in_queue(full) == []

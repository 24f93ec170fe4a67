"""A run on the bed as its user sees it: submitted, watched in its folder, disturbed, and compared in the end."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_bed import SlurmBed

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from held_task import HELD_AT
from kill_trials import weights_sha256
from live_run import TINY_GPT2, ledger

__all__ = ["HELD_AT", "SubmittedRun", "each_sample_once", "ledger", "train_here", "weights_sha256", "write_job"]

PATIENCE_S = 400.0
EPOCHS, SAMPLES, GLOBAL_BATCH = 3, 92, 8


def write_job(folder: Path, name: str, **sections: Any) -> Path:
    """Write a job that trains a tiny GPT-2 with dropout on the CPU, held in each attempt; its gate lies in `folder`."""
    rows = folder / "questions.jsonl"
    if not rows.exists():
        draw = random.Random(7)
        texts = [
            " ".join([f"Question {index}: {draw.randrange(100)}?"] * draw.randint(1, 3)) for index in range(SAMPLES)
        ]
        written = [{"question": text, "answer": f"It is {draw.randrange(100)}."} for text in texts]
        rows.write_text("".join(json.dumps(row) + "\n" for row in written))
        shutil.copy(Path(__file__).with_name("held_task.py"), folder)
        (folder / "gate").mkdir()
    job: dict[str, Any] = {
        "name": name,
        "output_dir": str(folder / "runs"),
        "task": "held_task:Held",
        "task_options": {"gate": str(folder / "gate")},
        "model": {"from_scratch": TINY_GPT2, "tokenizer": {"vocab_size": 400}},
        "data": {"path": str(rows), "max_length": 96, "cache_dir": str(folder / "cache")},
        "train": {"global_batch_size": GLOBAL_BATCH, "learning_rate": 1e-3, "num_train_epochs": float(EPOCHS)},
        "checkpoint": {"every": "1000 steps"},
        "resources": {"device": "cpu", "precision": "fp32"},
        "tracking": [],
    }
    job |= {key: job.get(key, {}) | value if isinstance(value, dict) else value for key, value in sections.items()}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(job, indent=1))
    return path


def each_sample_once(run_dir: Path) -> bool:
    """Say whether the steps follow each other, and go through each epoch's order of the samples without a gap."""
    rows = ledger(run_dir)
    seen = [0, *(row["samples_seen"] for row in rows)]
    whole, rest = divmod(SAMPLES, GLOBAL_BATCH)
    sizes = ([GLOBAL_BATCH] * whole + [rest]) * EPOCHS
    return [after - before for before, after in itertools.pairwise(seen)] == sizes


def train_here(job: Path) -> Path:
    """Train a job with `trainwright train`, not held, and return its run folder."""
    written = json.loads(job.read_text())
    (gate := Path(written["task_options"]["gate"]) / "attempt_1").touch()
    done = subprocess.run(
        [sys.executable, "-m", "trainwright", "train", job.name],
        cwd=job.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    gate.unlink()
    assert done.returncode == 0, done.stderr
    return Path(written["output_dir"]) / written["name"]


@dataclass
class SubmittedRun:
    """A run in the bed's queue; `job_id` is its latest job."""

    bed: SlurmBed
    job: Path
    job_id: str
    run_dir: Path

    @classmethod
    def submit(cls, bed: SlurmBed, job: Path, *arguments: str) -> SubmittedRun:
        """Run `trainwright submit JOB ARGUMENTS...`."""
        done = bed.trainwright("submit", job.name, *arguments, cwd=job.parent)
        assert done.returncode == 0, done.stderr
        written = json.loads(job.read_text())
        return cls(bed, job, done.stdout.split()[0], Path(written["output_dir"]) / written["name"])

    @property
    def said(self) -> str:
        """What all jobs of the run have printed."""
        logs = sorted((self.run_dir / "logs").glob("train_*"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in logs)

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        """Wait for a condition; the job must not fail meanwhile."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            state = self.bed.job(self.job_id)["JobState"]
            assert state not in ("FAILED", "NODE_FAIL", "TIMEOUT"), f"{state} before {what}:\n{self.said}"
            assert time.monotonic() < deadline_s, f"waited {PATIENCE_S:.0f} s for {what}; {state}:\n{self.said}"
            time.sleep(0.1)

    def wait_until_held(self, attempt: int) -> None:
        """Wait until an attempt stands before its fourth step."""
        start = self.run_dir / "logs" / f"attempt_{attempt}" / "start.json"
        self.wait_for(f"attempt {attempt}", start.exists)
        held_after = json.loads(start.read_text())["step"] + HELD_AT - 1
        self.wait_for(
            f"step {held_after} of attempt {attempt}",
            lambda: (
                (rows := ledger(self.run_dir)) and rows[-1]["attempt"] == attempt and rows[-1]["step"] == held_after
            ),
        )

    def open(self, attempt: int) -> None:
        """Let an attempt train to its end."""
        (self.job.parent / "gate" / f"attempt_{attempt}").touch()

    def start_again(self, restarts: int) -> None:
        """Wait until the job is back in the queue, and lift the two minutes that Slurm holds it there."""
        self.wait_for(
            "the job in the queue again",
            lambda: (job := self.bed.job(self.job_id))["JobState"] == "PENDING" and job["Restarts"] == str(restarts),
        )
        # Sooner, slurmd refuses the job's new credential (measured on 22.05 and 24.11).
        time.sleep(2)
        self.bed.run("scontrol", "update", f"JobId={self.job_id}", "StartTime=now")

    def finish(self) -> None:
        """Wait for the job to complete."""
        state = self.bed.wait_job(self.job_id, deadline_s=PATIENCE_S)["JobState"]
        assert state == "COMPLETED", f"{state}:\n{self.said}"

    def checkpoints(self) -> list[int]:
        """Return the steps of the checkpoints there are, in order."""
        return sorted(int(path.name.removeprefix("checkpoint-")) for path in self.run_dir.glob("checkpoint-*"))

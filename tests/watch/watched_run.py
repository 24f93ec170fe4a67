"""A real `trainwright train` to look at, which goes on until it is told to stop."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.runs.records import read

TRAINWRIGHT = str(Path(sys.executable).with_name("trainwright"))
PATIENCE_S = 240


def write_watched_job(folder: Path, **sections: Any) -> Path:
    """Write `<folder>/job.yaml` of a run named `live`: two ranks under DDP, more steps than any test waits for."""
    draw = random.Random(7)
    rows = [{"question": f"{draw.randrange(99)} and {draw.randrange(99)}?", "answer": "It is so."} for _ in range(64)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(Path(__file__).with_name("slow_task.py"), folder)
    job: dict[str, Any] = {
        "name": "live",
        "output_dir": str(folder / "outputs"),
        "task": "slow_task:Slow",
        "task_options": {"pause_s": 0.15},
        "model": {
            "from_scratch": {
                "architecture": "gpt2",
                "dimensions": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
            },
            "tokenizer": {"vocab_size": 400},
        },
        "data": {"path": str(folder / "questions.jsonl"), "max_length": 64, "cache_dir": str(folder / "cache")},
        "train": {"global_batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-3, "max_steps": 100_000},
        "checkpoint": {"every": "100000 steps"},
        "resources": {"device": "cpu", "precision": "fp32", "ranks": 2, "strategy": "ddp"},
        "tracking": [],
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job | sections))
    return path


@dataclass
class WatchedRun:
    """A run under way, its folder and its console."""

    process: subprocess.Popen[bytes]
    folder: Path
    console: Path

    @classmethod
    def start(cls, job: Path, **variables: str) -> WatchedRun:
        """Start the run of a job file."""
        console = job.with_name("console.txt")
        with console.open("wb") as output:
            process = subprocess.Popen(
                [TRAINWRIGHT, "train", job],
                stdout=output,
                stderr=output,
                cwd=job.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
            )
        return cls(process, job.parent / "outputs" / "live", console)

    def wait_for(self, happened: Callable[[], Any], what: str) -> Any:
        """Return what `happened` says once it says something; the run has to go on meanwhile."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            if found := happened():
                return found
            assert self.process.poll() is None, self.console.read_text()
            time.sleep(0.1)
        raise AssertionError(f"no {what} within {PATIENCE_S} s; {self.console.read_text()}")

    def samples(self) -> list[dict[str, Any]]:
        """Return what the sampler wrote so far."""
        return list(read(self.folder / "system.jsonl"))

    def steps(self) -> dict[int, dict[str, Any]]:
        """Return what is recorded of each step so far."""
        return {record["step"]: record for record in read(self.folder / "metrics.jsonl") if record["kind"] == "train"}

    def alerts(self) -> list[dict[str, Any]]:
        """Return the alerts so far."""
        return list(read(self.folder / "alerts.jsonl"))

    def stop(self) -> int:
        """Ask the run to save and end, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


def watch(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `trainwright watch ARGUMENTS` to its end."""
    return subprocess.run(
        [TRAINWRIGHT, "watch", *arguments],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )

"""Real runs of `trainwright train` on the CPU, with the memory of all their processes sampled from outside."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

SAMPLE_INTERVAL_S = 0.02


@dataclass
class Resident:
    """Peaks in bytes: private memory of each process by its part in the run, and PSS of all of them together.

    Private is anonymous and shared anonymous memory: what no page cache can give back.
    """

    private_bytes: dict[str, int] = field(default_factory=dict)
    node_bytes: int = 0

    def add(self, launcher: psutil.Process) -> None:
        """Take one sample of a launcher and all that it has started."""
        together = 0
        for process in (launcher, *launcher.children(recursive=True)):
            try:
                sizes = dict(_rollup(process.pid))
                role = _role(process, launcher)
            except (OSError, psutil.Error):
                continue  # it ended meanwhile
            if not sizes:
                continue
            private = sizes["Pss_Anon"] + sizes["Pss_Shmem"]
            self.private_bytes[role] = max(self.private_bytes.get(role, 0), private)
            together += sizes["Pss"]
        self.node_bytes = max(self.node_bytes, together)


def write_job(folder: Path, dimensions: dict[str, int], **sections: Any) -> Path:
    """Write `<folder>/job.yaml`: a llama of these dimensions from scratch on made-up questions, on the CPU."""
    draw = random.Random(5)
    rows = [
        {"question": f"{draw.randrange(1000)} plus {draw.randrange(1000)}?", "answer": str(draw.randrange(2000))}
        for _ in range(64)
    ]
    data = folder / "questions.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job: dict[str, Any] = {
        "name": "run",
        "output_dir": str(folder / "runs"),
        "model": {
            "from_scratch": {"architecture": "llama", "dimensions": dimensions},
            "tokenizer": {"vocab_size": 300},
        },
        "data": {"path": str(data), "max_length": 32, "cache_dir": str(folder / "tokens")},
        "train": {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 3},
        "checkpoint": {"every": "1000 steps"},
        "resources": {"device": "cpu", "precision": "fp32"},
        "tracking": [],
    }
    for key, value in sections.items():
        job[key] = job.get(key, {}) | value
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML 1.2
    return path


def sampled_run(job: Path) -> Resident:
    """Run `trainwright train` to its end and return what its processes took."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    log = job.with_suffix(".log")
    resident = Resident()
    with log.open("w") as output:
        command = [str(Path(sys.executable).with_name("trainwright")), "train", str(job)]
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=job.parent, env=environment)
        launcher = psutil.Process(process.pid)
        while process.poll() is None:
            resident.add(launcher)
            time.sleep(SAMPLE_INTERVAL_S)
    assert process.returncode == 0, log.read_text()
    return resident


def _rollup(pid: int) -> Iterator[tuple[str, int]]:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, amount, _unit = line.split()
        yield name.rstrip(":"), int(amount) * 1024


def _role(process: psutil.Process, launcher: psutil.Process) -> str:
    command = process.cmdline()
    if process.pid == launcher.pid:
        return "launcher"
    if "trainwright.train.prepare" in command:
        return "prepare"
    return f"rank {process.environ()['RANK']}" if "trainwright.train" in command else "other"

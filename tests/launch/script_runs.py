"""Runs of a user's own script by the installed command, for tests: a small script without torch, and its run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEADLINE_S = 180.0

LOOP = """
import argparse, json, os, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--resume", type=Path)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--wait-at", type=int, help="go no further while the file `go` is not there")
parser.add_argument("--save-s", type=float, default=0.0, help="how long the last save takes")
args = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
step = int(args.resume.name.partition("-")[2]) if args.resume else 0
while step < args.steps and not stop:
    step += 1
    if rank == 0:
        said = f"step {step}/{args.steps} | epoch {step / 6:.2f} | loss: {3 / step:.4f} | lr 1e-3 | 0.25 s/step"
        print(said, flush=True)
        if step % 4 == 0:
            place = args.out / f"checkpoint-{step}"
            place.mkdir(exist_ok=True)
            (place / "state.json").write_text(json.dumps(step))
    while step == args.wait_at and not Path("go").exists() and not stop:
        time.sleep(0.02)
if rank == 0 and stop:
    time.sleep(args.save_s)
    (args.out / f"checkpoint-{step}").mkdir(exist_ok=True)
    (args.out / f"checkpoint-{step}" / "state.json").write_text(json.dumps(step))
"""
"""Counts steps, prints a line for each, saves every fourth, and on SIGTERM saves and ends."""

JOINED = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
Path(sys.argv[1], f"joined_{dist.get_rank()}").touch()
while not Path("go").exists():
    dist.all_reduce(one)
    time.sleep(0.1)
dist.barrier()
dist.destroy_process_group()
"""
"""A script whose ranks have met and work until they are told that it is enough."""

LOOP_COMMAND = ["python", "loop.py", "--out", "{output_dir}", "--resume", "{resume_from}"]


@dataclass
class ScriptRun:
    """A folder with a job in it, from which `trainwright` is run."""

    place: Path
    name: str = "own"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.place / "outputs" / self.name

    def write_job(self, script: list[str], **sections: Any) -> None:
        """Write job.yaml for a script; JSON is YAML."""
        resources = {"device": "cpu", **sections.pop("resources", {})}
        job = {"name": self.name, "script": script, "resources": resources, **sections}
        (self.place / "job.yaml").write_text(json.dumps(job))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `trainwright train job.yaml` with more arguments."""
        return subprocess.Popen(
            [sys.executable, "-m", "trainwright", "train", "job.yaml", *arguments],
            cwd=self.place,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def train(self, *arguments: str) -> tuple[int, str, str]:
        """Run it to its end; return exit code, stdout and stderr."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
        return process.returncode, stdout, stderr

    def records(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """Return the whole records of a file of the run folder."""
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def note(self, attempt: int, rank: int, what: str = "started") -> dict[str, Any]:
        """Return what a rank wrote down of itself."""
        path = self.folder / "logs" / f"attempt_{attempt}" / f"rank_{rank}.{what}.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return once the condition holds; fail if the process ends before, or after a generous deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s, "the deadline has passed"
        time.sleep(0.02)

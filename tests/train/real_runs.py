"""Real runs of the installed `trainwright train`, as the fixtures of conftest.py start them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLES = 92
"""Not a multiple of the global batch of 8: the last batch of each epoch holds 4."""

TINY_LLAMA = {
    "architecture": "llama",
    "dimensions": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    },
}


@dataclass(frozen=True)
class CompletedRun:
    """What a finished `trainwright train` left: exit code, both streams, and the run folder."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All records of metrics.jsonl, in the order they were written."""
        return read_records(self.folder / "metrics.jsonl")

    def steps(self, kind: str = "train") -> dict[int, dict[str, Any]]:
        """The records of one kind by step; where a step was done twice, the later record."""
        return {record["step"]: record for record in self.metrics if record["kind"] == kind}

    @property
    def losses(self) -> list[float]:
        """The training loss of each step, from step 1 on without a gap."""
        steps = self.steps()
        assert sorted(steps) == list(range(1, len(steps) + 1)), sorted(steps)
        return [float(steps[step]["loss"]) for step in sorted(steps)]


@dataclass
class RunningTrain:
    """A `trainwright train` under way."""

    process: subprocess.Popen[str]
    folder: Path

    def wait_for_step(self, step: int, timeout_s: float = 120) -> None:
        """Return once metrics.jsonl holds a training record of `step` or a later one written by this command."""
        path = self.folder / "metrics.jsonl"
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            done = [record["step"] for record in read_records(path) if record["kind"] == "train"]
            if done and done[-1] >= step:
                return
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.005)
        raise AssertionError(f"no step {step} within {timeout_s} s")

    def finish(self, timeout_s: float = 240) -> CompletedRun:
        """Wait for the end of the command."""
        stdout, stderr = self.process.communicate(timeout=timeout_s)
        return CompletedRun(self.process.returncode, stdout, stderr, self.folder)


RunTrain = Callable[..., CompletedRun]
StartTrain = Callable[..., RunningTrain]
WriteJob = Callable[..., Path]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a jsonl file, none if it is not there; a line being written is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

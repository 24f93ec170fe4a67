"""A job and a run folder around a data file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright.job.schema import Job

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Make a run folder whose job reads the given data; the token cache lies in the test's own folder."""

    def make(data: dict[str, Any], *, name: str = "run", vocab_size: int = 300, **job: Any) -> Path:
        run = tmp_path / name
        run.mkdir(exist_ok=True)
        scratch = {"architecture": "llama", "dimensions": {}}
        resolved = Job.model_validate(
            {
                "name": name,
                "model": {"from_scratch": scratch, "tokenizer": {"vocab_size": vocab_size}},
                "data": {"cache_dir": str(tmp_path / "cache"), "max_length": 64} | data,
            }
            | job
        )
        (run / "resolved.json").write_text(resolved.model_dump_json())
        return run

    return make


_PEAK = """
import pathlib, re, resource, sys

def peak_kib():
    if sys.platform == "linux":
        # Not ru_maxrss: a child begins with the peak of the process that started it (exec_mmap, fs/exec.c).
        return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)
"""


@pytest.fixture
def numbers_of() -> Callable[..., list[int]]:
    """Run a program in a process of its own, where `peak_kib()` is its peak resident memory; return what it prints."""

    def run(program: str, *arguments: Path) -> list[int]:
        command = [sys.executable, "-c", _PEAK + program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return [int(number) for number in done.stdout.split()]

    return run


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Forty questions with answers, as JSON Lines."""
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {a} plus {a + 1}?", "answer": f"It is {2 * a + 1}."} for a in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

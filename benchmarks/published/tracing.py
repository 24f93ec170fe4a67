"""Requests traced in processes of another interpreter, such as one with the library versions that a source used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOGETHER = 6
"""Requests traced in one process, so that its imports are shared."""
PATIENCE_S = 900
"""For one process; a 70 B model takes 15 s on an idle core."""


def transformers_version(python: str) -> str:
    """Return the version of transformers that an interpreter has."""
    command = [python, "-c", "from importlib.metadata import version; print(version('transformers'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def trace_all(requests: Sequence[dict[str, Any]], python: str) -> list[dict[str, Any]]:
    """Return an answer for each request; one that cannot be traced has `error`."""
    answers: list[dict[str, Any]] = []
    for begin in range(0, len(requests), TOGETHER):
        answers += _trace(requests[begin : begin + TOGETHER], python)
        print(f"{len(answers)} of {len(requests)} requests traced", file=sys.stderr)
    return answers


def _trace(requests: Sequence[dict[str, Any]], python: str) -> list[dict[str, Any]]:
    """Trace in one process; if that breaks down, each request in one of its own."""
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(requests, file)
        file.flush()
        command = [python, "-m", "trainwright.estimate.trace.answer", file.name]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            last_words = f"no answer in {PATIENCE_S} s"
        else:
            if done.returncode == 0:
                answers: list[dict[str, Any]] = json.loads(done.stdout)
                return answers
            last_words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if len(requests) > 1:
        return [answer for request in requests for answer in _trace([request], python)]
    return [{"error": f"the trace broke down: {last_words}"}]

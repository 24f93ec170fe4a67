"""Evaluations as a user starts them: the command, its data, and waiting for what it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

DEADLINE_S = 180
NAMES = [
    f"{first}{second}" for first in ("alpha", "bravo", "delta", "gamma") for second in ("one", "two", "six", "ten")
]
QUESTIONS = 23


def write_benchmark(folder: Path, questions: int = QUESTIONS) -> None:
    """Write questions on codes, and a corpus with a passage for each, into a folder."""
    names = [f"{NAMES[number % 16]}{'xyz'[number // 16]}" for number in range(questions)]
    codes = [f"k{number * 37 % 101}" for number in range(questions)]
    rows, passages = [], []
    for number, (name, code) in enumerate(zip(names, codes, strict=True)):
        others = [codes[(number + step) % questions] for step in (1, 2, 3)]
        choices = [*others[: number % 4], code, *others[number % 4 :]]
        rows.append(
            {
                "id": f"q-{number:02}",
                "question": f"What is the code of {name}?",
                "choices": choices,
                "answer": choices.index(code) + 1,
                "difficulty": ("easy", "medium", "hard")[number % 3],
                "gold_passages": [f"p-{number:02}"],
            }
        )
        passages.append({"id": f"p-{number:02}", "text": f"The code of {name} is {code}."})
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in passages))
    (folder / "eval.yaml").write_text(
        "model: acme/reader-7B\n"
        "engine: eval_engines:Reader\n"
        "data: {path: questions.jsonl, first_choice: 1}\n"
        "retrieval: {corpus: corpus.jsonl, k: 1, cache_dir: cache}\n"
        f"n_questions: {questions}\n"
        "difficulty: mixed\n"
        "batch_size: 2\n"
    )


def environment(gate: Path | None = None) -> dict[str, str]:
    """Return an environment in which the engines of the tests can be named."""
    own = {"PYTHONPATH": str(Path(__file__).parent), "COLUMNS": "80"}
    return {**os.environ, **own, **({"EVAL_GATE": str(gate)} if gate else {})}


def command(*arguments: str) -> list[str]:
    """Return the command line of `trainwright eval`."""
    return [sys.executable, "-m", "trainwright", "eval", *arguments]


def run(folder: Path, *arguments: str, gate: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `trainwright eval` in a folder to its end."""
    return subprocess.run(
        command(*arguments), cwd=folder, env=environment(gate), capture_output=True, text=True, timeout=DEADLINE_S
    )


def start(folder: Path, *arguments: str, gate: Path) -> subprocess.Popen[str]:
    """Start `trainwright eval` in a folder."""
    return subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=environment(gate),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def close_gate(gate: Path, engines: int, before_call: int) -> None:
    """Have so many engines stop before one of their calls."""
    gate.mkdir(exist_ok=True)
    for left in gate.glob("held-*"):
        left.unlink()
    (gate / "hold").write_text(f"{engines} {before_call}")


def held(gate: Path, engines: int) -> list[int]:
    """Wait until so many engines stand at the gate, and return their processes."""
    files = [gate / f"held-{place}" for place in range(engines)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in files))
    return [int(path.read_text()) for path in files]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, not for a time."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came to that"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Say whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def results(folder: Path) -> dict[str, Any]:
    """Return the one results file below a folder."""
    [path] = (folder / "results").glob("*/*.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def answered(folder: Path) -> int:
    """Return how many answers are on disk."""
    return sum(path.read_bytes().count(b"\n") for path in (folder / "results").glob("*/*.lines/worker-*.jsonl"))


def without_times(value: Any) -> Any:
    """Return a document without what hangs on the clock."""
    if isinstance(value, dict):
        return {key: without_times(member) for key, member in value.items() if key not in ("seconds", "timestamp")}
    return [without_times(member) for member in value] if isinstance(value, list) else value

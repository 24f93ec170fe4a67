"""Engines without a model, named to `trainwright eval` as a user names an engine of their own: eval_engines:Reader.

Gates are files in the folder EVAL_GATE: an engine stops before its nth call if the gate says so, tells that it did, and
goes on only when the gate is open.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.engines.engine import EngineSettings, Generated

QUESTION = re.compile(r"Question: What is the code of (\w+)\?")


class Reader:
    """Answers what the passages of the prompt say, else by chance that belongs to the prompt; sometimes nothing."""

    name = "reader"

    def __init__(self, settings: EngineSettings) -> None:
        self.notes = [f"reads {settings.model}"]
        self._calls = 0

    def generate(self, prompts: Sequence[str], *, max_new_tokens: int) -> list[Generated]:
        self._calls += 1
        gate = os.environ.get("EVAL_GATE")
        if gate:
            _pass(Path(gate), self._calls)
            with (Path(gate) / "calls.txt").open("a") as calls:
                calls.write(f"{os.getpid()} {len(prompts)}\n")
        return [Generated(_answer(prompt), 3, len(prompt.split()), 0.5) for prompt in prompts]

    def close(self) -> None:
        """Nothing to give back."""


class OutOfMemory(Reader):
    """Fails as an engine does that no remedy saved."""

    def generate(self, prompts: Sequence[str], *, max_new_tokens: int) -> list[Generated]:
        raise UserError("not even one prompt fits", hints=["a smaller model"], exit_code=ExitCode.OUT_OF_MEMORY)


class Faulty(Reader):
    """Fails as a program does that has a bug."""

    def generate(self, prompts: Sequence[str], *, max_new_tokens: int) -> list[Generated]:
        raise ZeroDivisionError("a bug of the engine")


def _answer(prompt: str) -> str:
    name = QUESTION.search(prompt)
    told = name and re.search(rf"code of {name[1]} is (\w+)", prompt)
    if told:
        return told[1]
    number = int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % 5
    return str(number) if number else "I cannot say"


def _pass(gate: Path, calls: int) -> None:
    """Wait at the gate: `hold` holds how many engines stop, and before which of their calls."""
    hold = gate / "hold"
    if not hold.exists():
        return
    most, before = map(int, hold.read_text().split())
    if calls != before:
        return
    for place in range(most):
        try:
            (gate / f"held-{place}").open("x").write(str(os.getpid()))
        except FileExistsError:
            continue
        while not (gate / "open").exists():
            time.sleep(0.02)
        return

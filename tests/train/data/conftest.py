"""A job and a run folder around a data file."""

from __future__ import annotations

import json
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


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Forty questions with answers, as JSON Lines."""
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {a} plus {a + 1}?", "answer": f"It is {2 * a + 1}."} for a in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

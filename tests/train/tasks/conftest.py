"""A tokenizer and jobs for the tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainwright.job.schema import Job
from trainwright.train.data.tokenizer import train_tokenizer


@pytest.fixture
def tokenizer() -> Any:
    """A byte-level tokenizer whose merges span the border between words."""
    return train_tokenizer(["question answer 12 Paris is in France.\n"] * 20, 320, ends_with_eos=False)


@pytest.fixture
def make_job() -> Callable[..., Job]:
    """Make a job of a small model from scratch."""

    def make(task: str = "causal-lm", data: dict[str, Any] | None = None, **more: Any) -> Job:
        scratch = {"architecture": "llama", "dimensions": {}}
        model = {"from_scratch": scratch, "tokenizer": {"vocab_size": 320}}
        return Job.model_validate({"name": "t", "task": task, "model": model, "data": data or {}} | more)

    return make

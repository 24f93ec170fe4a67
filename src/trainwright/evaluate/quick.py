"""`trainwright eval --quick`: the guide's three tests of five questions each (S3-03), every one from the start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.evaluate.eval_config import DEFAULT_FIXED_K, EvalConfig

QUESTIONS = 5


@dataclass(frozen=True)
class QuickTest:
    """One of the three, and what it shows."""

    title: str
    asked: EvalConfig


def quick_tests(asked: EvalConfig) -> Iterator[QuickTest]:
    """Yield the tests: one worker, one on each GPU (two on a processor), and a comparison; each in its own folder."""
    one = None if asked.policies is None else asked.policies[:1]
    without = asked.retrieval == "none"
    two = ["always-reason", "no-retrieval"] if without else ["mdp", f"fixed:{DEFAULT_FIXED_K}"]
    yield QuickTest("one worker", _changed(asked, "1_single", gpu_mode="single", policies=one, workers="auto"))
    yield QuickTest("a copy on each device", _changed(asked, "2_data_parallel", gpu_mode="data_parallel", policies=one))
    yield QuickTest("two policies compared", _changed(asked, "3_comparison", policies=two))


def _changed(asked: EvalConfig, folder: str, **changes: Any) -> EvalConfig:
    output_dir = str(Path(asked.output_dir) / "results" / "quick" / folder)
    given = asked.model_dump(exclude_unset=True)
    return EvalConfig.model_validate({**given, "n_questions": QUESTIONS, "output_dir": output_dir, **changes})

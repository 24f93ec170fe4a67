"""Runs that are stopped, killed or starved, and the one run left alone that each of them has to equal in the end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from kill_trials import SAVE_EVERY_STEPS, Trials, weights_sha256
from live_run import TINY_GPT2, LiveRun, ledger

from trainwright.runs import RunFolder
from trainwright.runs.checkpoints import newest_valid

__all__ = ["SAVE_EVERY_STEPS", "TINY_GPT2", "LiveRun", "Trials", "ledger"]

WriteDropoutJob = Callable[..., Path]


def newest_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, all of which have to be whole; 0 if there is none."""
    if not (run_dir / "run.json").exists():
        return 0
    _, manifest, skipped = newest_valid(RunFolder(run_dir))
    assert not skipped
    return manifest.step if manifest else 0


def assert_same_end(run_dir: Path, undisturbed: Path) -> None:
    """G3: the weights and every loss on the way are those of the run left alone, bit by bit."""
    assert [row["loss"] for row in ledger(run_dir)] == [row["loss"] for row in ledger(undisturbed)]
    assert weights_sha256(run_dir) == weights_sha256(undisturbed)


def finish(folder: Path, run_dir: Path, *arguments: str) -> str:
    """Give the command once more, which has to bring the run to its end; return what it said."""
    with LiveRun(folder, run_dir, arguments) as run:
        assert run.end() == 0, run.said
    return run.said

"""A run whose memory runs out goes on by itself with less at once, and learns what it would have learned."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from oom_trials import MICRO_BATCH, MOST_DIFFERENT, Scarcity, Trials

from trainwright.runs.records import read
from trainwright.runs.writing import read_json


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    """Two ranks without dropout, and their run with memory enough."""
    return Trials(tmp_path_factory.mktemp("scarce"))


def test_one_rank_that_runs_out_in_training_and_in_evaluation_is_followed_by_all(trials: Trials) -> None:
    """M01 to M03: at step 3, after two steps were committed, and before the first evaluation; nothing hangs.

    Samples, evaluations and final weights are those of the run with memory enough; each change is told, with its
    reason, and written down.
    """
    scarce = Scarcity(
        "rank 1, at step 3, then in evaluation",
        "cuBLAS",
        "ddp",
        {"ranks": [1], "room": 2, "step": 3, "evaluation_room": 6},
    )
    outcome, run = trials.run("scarce", scarce)
    # An evaluation of 12 is too much as well, which is tried after the first step. Training is next, at its third pass.
    assert outcome.problems == [], run.said
    assert outcome.samples_as_planned
    assert outcome.largest_difference is not None and outcome.largest_difference <= MOST_DIFFERENT
    assert outcome.largest_metric_difference is not None and outcome.largest_metric_difference <= MOST_DIFFERENT
    changes = [event for event in read(run.run_dir / "events.jsonl") if event["event"] == "less memory"]
    told = [(key, choice["value"]) for change in changes for key, choice in change["choices"].items()]
    assert told == [
        ("eval.batch_size", 6),
        ("train.micro_batch_size", 2),
        ("train.gradient_accumulation_steps", 2),
    ]
    starts = [run.start_step(attempt) for attempt in range(1, run.attempt + 1)]
    assert starts == [0, 0, 2]
    assert f"train.micro_batch_size = 2  (half of {MICRO_BATCH}: memory ran out in training, attempt 2)" in run.said
    assert "rank 1 failed:\nerror: out of memory in training: CUDA error: CUBLAS_STATUS_ALLOC_FAILED" in run.said


@pytest.mark.long
def test_where_a_single_sample_is_too_much_the_run_says_what_would_help_and_a_later_start_does_not_begin_again(
    trials: Trials,
) -> None:
    """M04: three attempts and exit 77, the figures and three commands; then one attempt, with all that was learned."""
    scarce = Scarcity("a single sample", "torch", "auto", {"ranks": [0, 1], "room": 0}, survives=False)
    outcome, run = trials.run("hopeless", scarce)
    assert outcome.problems == [], run.said
    assert (outcome.exit_code, outcome.attempts) == (77, 3)
    layout = read_json(run.run_dir / "plan.json")["layout"]
    assert layout["gradient_checkpointing"]
    assert layout["strategy"] == "zero3"
    error = run.said[run.said.rindex("error: out of memory, and") :]
    assert "Tried to allocate 1.25 GiB" in error
    assert "705.00 MiB is free" in error
    assert len(re.findall(r"^hint: .*trainwright train job.yaml name=hopeless ", error, re.MULTILINE)) == 3
    with trials.start("hopeless", scarce) as again:
        assert again.end() == 77, again.said
    assert again.attempt == 4
    assert "train.gradient_checkpointing = True  (activations are computed twice instead of kept: " in again.said
    assert "resources.strategy = zero3  (keeps the least on each rank: " in again.said

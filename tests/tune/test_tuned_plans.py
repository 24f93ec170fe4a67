"""What a plan takes from an answer of `trainwright tune`, and when it does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright.hardware.inventory_source import asked_inventory
from trainwright.job.schema import Job
from trainwright.plan.choose import Plan, choose
from trainwright.plan.tuned import MeasuredMicroBatch, Tuned, fitting, keep, setting_of, stored_answers
from trainwright.plan.wish import Wish

GPUS = asked_inventory("a100-80gb:2", "auto").usable
JOB: dict[str, Any] = {
    "name": "a",
    "model": {"name": "Qwen/Qwen2.5-0.5B"},
    "data": {"path": "rows.jsonl", "max_length": 1024},
    "train": {"global_batch_size": 64},
}


def planned(job: dict[str, Any], *tuned: Tuned, **wish: Any) -> Plan:
    """Return the plan of a job on two A100s that knows these answers."""
    return choose(Job.model_validate(job), {"train.global_batch_size"}, GPUS, Wish(tuned=tuned, **wish))[1]


def an_answer(**changes: Any) -> Tuned:
    """Return an answer for the job as it is planned without one: 3 is recommended, 5 the largest."""
    plan = planned(JOB)
    tuned = Tuned(
        date="2026-11-22T01:02:03+00:00",
        setting=setting_of(Job.model_validate(JOB), plan.layout, plan.devices),
        global_batch_size=64,
        points=tuple(MeasuredMicroBatch(micro_batch_size=size, step_s=1 / size) for size in (1, 3, 5)),
        levels={"conservative": 1, "recommended": 3, "aggressive": 5, "extreme": 5},
        level="recommended",
        too_large=6,
        why="CUDA out of memory",
        evaluated=6,
        probes=2,
        steps=20,
    )
    return dataclasses.replace(tuned, **changes)


def test_what_was_measured_comes_before_what_is_estimated() -> None:
    """S2-17: the global batch is kept, and the estimate shown is that of what will run; evaluation is part of it."""
    plan = planned(JOB, an_answer())
    layout = plan.layout
    assert (layout.micro_batch_size, layout.gradient_accumulation_steps, layout.global_batch_size) == (3, 11, 64)
    assert layout.eval_batch_size == 6, "an evaluation of 9 was not gone through"
    reasons = {key: choice.reason for key, choice in plan.choices.items()}
    assert reasons["train.micro_batch_size"] == "measured by tune on 2026-11-22, recommended"
    assert reasons["eval.batch_size"] == reasons["train.micro_batch_size"]
    assert plan.estimate is not None
    untuned = planned(JOB | {"train": {"global_batch_size": 64, "micro_batch_size": 3}, "eval": {"batch_size": 6}})
    assert untuned.estimate is not None
    assert plan.estimate.memory == untuned.estimate.memory


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data", {"path": "rows.jsonl", "max_length": 2048}),
        ("data", {"path": "other.jsonl", "max_length": 1024}),
        ("model", {"name": "Qwen/Qwen2.5-1.5B"}),
        ("method", {"type": "lora", "r": 8}),
        ("resources", {"precision": "fp32"}),
        ("resources", {"strategy": "ddp"}),
        ("train", {"global_batch_size": 64, "optim": "adafactor"}),
        ("train", {"global_batch_size": 64, "gradient_checkpointing": True}),
        ("train", {"global_batch_size": 64, "micro_batch_size": 8}),
    ],
)
def test_an_answer_for_something_else_is_left_aside(key: str, value: dict[str, Any]) -> None:
    """U-07: by model, method, length, precision, strategy and GPU; and what a user gives is never overruled."""
    job = JOB | {key: value}
    assert planned(job, an_answer()).layout == planned(job).layout


def test_gpus_of_different_speed_keep_the_parts_that_suit_their_speed() -> None:
    mixed = asked_inventory("a100-80gb:2,v100-32gb:2", "auto").usable
    job = Job.model_validate(JOB | {"resources": {"ranks": 4, "strategy": "ddp", "precision": "fp16"}})
    plan = choose(job, {"train.global_batch_size"}, mixed, Wish())[1]
    assert plan.layout.rank_samples
    answer = an_answer(setting=setting_of(job, plan.layout, plan.devices))
    assert choose(job, {"train.global_batch_size"}, mixed, Wish(tuned=(answer,)))[1].layout == plan.layout


def test_an_answer_that_met_the_longest_sample_there_can_be_holds_for_other_data() -> None:
    tuned = an_answer()
    any_data = dataclasses.replace(tuned, setting=dataclasses.replace(tuned.setting, data=None))
    job = JOB | {"data": {"path": "other.jsonl", "max_length": 1024}}
    assert planned(job, any_data).layout.micro_batch_size == 3


def test_a_run_that_has_begun_keeps_its_layout_and_the_newest_answer_counts() -> None:
    begun = planned(JOB).layout
    assert planned(JOB, an_answer(), keep=begun).layout == begun
    assert planned(JOB, an_answer(), an_answer(level="extreme")).layout.micro_batch_size == 5


def test_answers_survive_on_disk_and_lines_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    path = keep(an_answer(), tmp_path)
    torn: list[Callable[[str], str]] = [
        lambda line: line[: len(line) // 2],
        lambda line: line.replace('"micro_batch_size":3', '"micro_batch_size":"3"'),
        lambda line: line.replace('"level":"recommended"', '"level":"best"'),
        lambda line: line.replace('"probes":2', '"probs":2'),
        lambda line: "[]",
    ]
    line = path.read_text()
    for tear in torn:
        assert tear(line) != line
        path.write_text(path.read_text() + tear(line).rstrip("\n") + "\n")
    keep(an_answer(level="extreme"), tmp_path)
    assert stored_answers(tmp_path) == (an_answer(), an_answer(level="extreme"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert "Qwen" not in line
    assert "rows.jsonl" not in line


def test_a_micro_batch_is_what_the_parts_really_have() -> None:
    """T-11: 16 samples in parts of 7 at most are parts of 6."""
    assert [fitting(size, 16) for size in (1, 5, 7, 8, 15, 16, 99)] == [1, 4, 6, 8, 8, 16, 16]

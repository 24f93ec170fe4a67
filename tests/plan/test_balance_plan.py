"""GPUs of different speed in one plan: who computes how much, what that is worth, and that each holds its part."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning import planned, told

from trainwright.hardware.reading import GIB
from trainwright.plan.choose import Plan

MIXED = "a100-80gb:2,v100-32gb:2"


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: mixed\nmodel: {{name: Qwen/Qwen2.5-0.5B}}\ndata: {{path: {tmp_path}/data.jsonl, max_length: 512}}\n"
        "train: {global_batch_size: 64}\nresources: {ranks: 4}\n"
    )
    return str(path)


def time_of(plan: Plan) -> float:
    assert plan.estimate is not None and plan.estimate.time is not None
    return plan.estimate.time.step_s


def test_a_mixed_set_works_at_the_speed_of_its_sum(job: str) -> None:
    """S0-08, S0-09: the slow cards get less, all take about as long, and the gain over equal parts is told."""
    plan = planned(job, MIXED)
    fast, slow = plan.layout.rank_samples[:2], plan.layout.rank_samples[2:]
    assert sum(fast + slow) == 64
    assert min(fast) > max(slow)
    assert plan.estimate is not None and plan.estimate.time is not None and plan.estimate.equal_parts is not None
    before, after = plan.estimate.equal_parts.ranks_s, plan.estimate.time.ranks_s
    assert min(before) / max(before) < 0.6
    assert min(after) / max(after) > 0.8
    equal = planned(job, MIXED, "resources.balance=off", f"resources.strategy={plan.layout.strategy}")
    assert equal.layout.rank_samples == ()
    assert time_of(equal) / time_of(plan) > 1.25
    choice = plan.choices["resources.balance"]
    assert choice.value == " + ".join(map(str, plan.layout.rank_samples))
    assert f"{plan.estimate.equal_parts.step_s / time_of(plan):.2f} x as fast as equal parts" in choice.reason


def test_the_bars_before_and_after_are_shown(job: str) -> None:
    """S0-08: with equal parts the fast cards wait for the slow ones; with parts by speed all are busy."""
    text = told(job, MIXED)
    before, after = text[text.index("with equal parts:") :].split("with parts by speed, ")
    assert before.count("waits 5") == 2
    assert before.count("bottleneck") == 2
    assert after.count("% busy") == 4
    assert "with equal parts" not in told(job, MIXED, "resources.balance=off")


def test_the_memory_of_each_card_limits_what_it_takes_at_once(job: str) -> None:
    """A fast card with little memory takes its larger part in more micro-steps; all make as many."""
    plan = planned(job, "rtx-4090:1,v100-32gb:1", "resources.ranks=2", "resources.strategy=ddp", "data.max_length=1024")
    layout = plan.layout
    assert layout.rank_samples[0] > layout.rank_samples[1]
    assert max(layout.rank_micro_batch_sizes) < max(layout.rank_samples)
    for share, size in zip(layout.rank_samples, layout.rank_micro_batch_sizes, strict=True):
        assert -(-share // size) <= layout.gradient_accumulation_steps
    assert plan.estimate is not None and plan.estimate.capacity is not None
    assert plan.estimate.peak_bytes < plan.estimate.capacity.total_bytes
    assert plan.estimate.capacity.total_bytes < 33 * GIB


def test_equal_cards_get_equal_parts_and_nothing_is_said(job: str) -> None:
    plan = planned(job, "a100-80gb:4")
    assert plan.layout.rank_samples == plan.layout.rank_micro_batch_sizes == ()
    assert "resources.balance" not in plan.choices


def test_a_micro_batch_that_was_given_is_not_exceeded(job: str) -> None:
    plan = planned(job, MIXED, "train.micro_batch_size=4")
    assert max(plan.layout.rank_micro_batch_sizes) <= 4
    assert plan.layout.rank_samples[0] > plan.layout.rank_samples[-1]


def test_harm_14_a_gain_is_over_the_best_of_equal_parts(tmp_path: Path) -> None:
    """Parts by speed in larger micro-batches were held against equal parts in small ones: `1.99 x as fast`."""
    job = ("model.name=Qwen/Qwen2.5-7B", "method.type=lora", "data.max_length=384", "train.global_batch_size=16")
    file = tmp_path / "job.yaml"
    file.write_text("name: mixed\nmodel: {name: m}\nresources: {gpus: 4}\n")
    by_speed, equal = (
        planned(str(file), "rtx-4090:2,a100-40gb:2", *job, f"resources.balance={how}").ranked for how in ("auto", "off")
    )
    best: dict[str, float] = {}
    for candidate in equal:
        if candidate.why_not is None and candidate.estimate.time is not None:
            name = candidate.layout.strategy
            best[name] = min(best.get(name, candidate.estimate.time.step_s), candidate.estimate.time.step_s)
    shared = [candidate for candidate in by_speed if candidate.layout.rank_samples and candidate.why_not is None]
    assert shared
    for candidate in shared:
        assert len(set(candidate.layout.rank_samples)) > 1
        assert candidate.estimate.time is not None and candidate.estimate.equal_parts is not None
        assert candidate.estimate.time.step_s < candidate.estimate.equal_parts.step_s
        assert candidate.estimate.equal_parts.step_s <= 1.03 * best[candidate.layout.strategy]

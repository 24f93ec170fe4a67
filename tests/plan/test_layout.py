"""A layout checks itself: the equation that fails is shown with its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.errors import UserError
from trainwright.hardware.inventory import parse_inventory
from trainwright.job.schema import Job
from trainwright.plan.choose import choose
from trainwright.plan.layout import Layout
from trainwright.train.assignment import Assignment


def layout(**changes: Any) -> Layout:
    values: dict[str, Any] = {
        "device": "cuda",
        "visible_devices": "0,1",
        "ranks": 2,
        "strategy": "ddp",
        "precision": "bf16",
        "offload": "none",
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_batch_size": 6,
        "gradient_checkpointing": False,
    }
    return Layout(**values | changes)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"micro_batch_size": 1}, "1 x 2 x 2 = 4, but train.global_batch_size = 8"),
        ({"gradient_accumulation_steps": 3}, "2 x 3 x 2 = 12, more than the train.global_batch_size = 8 needs"),
        ({"ranks": 1, "gradient_accumulation_steps": 4}, "resources.strategy=ddp shares work among ranks"),
        ({"strategy": "single"}, "resources.strategy=single runs 1 rank, not 2"),
        ({"offload": "optimizer"}, "resources.offload=optimizer is done by ZeRO; resources.strategy=ddp has none"),
        ({"strategy": "zero2", "offload": "optimizer+parameters"}, "needs resources.strategy=zero3, not zero2"),
    ],
)
def test_a_layout_that_contradicts_itself_says_where(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        layout(**changes)
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]


def test_all_contradictions_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        layout(micro_batch_size=1, strategy="single", offload="optimizer")
    assert len(caught.value.problems) == 3


@settings(deadline=None)
@given(st.integers(1, 600), st.integers(1, 16), st.integers(1, 600))
def test_every_sample_of_a_global_batch_has_one_place(batch: int, ranks: int, rows: int) -> None:
    """S0-02, X-05: for any batch on any number of GPUs, also the short batch that ends an epoch."""
    job = Job.model_validate(
        {"name": "x", "model": {"name": "m"}, "data": {"path": "d"}, "train": {"global_batch_size": batch}}
    )
    devices = parse_inventory(f"a100-80gb:{ranks}").devices
    _, plan = choose(job, ("train.global_batch_size",), devices)
    made = plan.layout
    samples = np.arange(min(batch, rows), dtype=np.int64)
    places = [
        Assignment(
            rank=rank,
            local_rank=rank,
            world_size=ranks,
            attempt=1,
            device=made.device,
            strategy=made.strategy,
            precision=made.precision,
            micro_batch_size=made.micro_batch_size,
            gradient_accumulation_steps=made.gradient_accumulation_steps,
            eval_batch_size=made.eval_batch_size,
            gradient_checkpointing=made.gradient_checkpointing,
            offload=made.offload,
        )
        .split(made.global_batch_size)
        .parts(samples, 1 + samples % 7, spread=False)[rank]
        for rank in range(ranks)
    ]
    parts = [part for own in places for part in own]
    assert sorted(np.concatenate(parts).tolist()) == samples.tolist()
    assert max(len(part) for part in parts) <= made.micro_batch_size
    assert len({len(own) for own in places}) == 1
    if len(samples) == batch:
        assert len(places[0]) == made.gradient_accumulation_steps

"""The learning rate at each step, against transformers' and torch's own schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from trainwright.job.batch_schedule import BatchSchedule, Position
from trainwright.job.learning_rate import LearningRate
from trainwright.job.schema import TrainSection

PEAK, BATCH = 3e-4, 8


def rates(samples: int, **train: Any) -> list[float]:
    """Return the rate of each step of a whole run over `samples` samples."""
    section = TrainSection(global_batch_size=BATCH, learning_rate=PEAK, **train)
    course = BatchSchedule.of(section, samples=samples)
    curve = LearningRate.of(section, peak=PEAK, total_samples=course.total_samples)
    return [curve.at(batch.before.samples_seen) for batch in course.batches(Position())]


def rates_of(scheduler: Any, steps: int) -> list[float]:
    """Return the rate with which each step is taken under a torch scheduler, that is, before `scheduler.step()`."""
    taken = []
    for _ in range(steps):
        taken.append(float(scheduler.get_last_lr()[0]))
        scheduler.optimizer.step()
        scheduler.step()
    return taken


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)


@pytest.mark.parametrize("shape", ["linear", "cosine", "constant", "constant_with_warmup"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_whole_batches_follow_the_schedulers_of_transformers(shape: str, warmup: int) -> None:
    """T: the names are transformers', so the curves are too, over three epochs of ten steps."""
    ours = rates(80, lr_scheduler_type=shape, warmup_steps=float(warmup), num_train_epochs=3.0)
    theirs = rates_of(get_scheduler(shape, optimizer(), num_warmup_steps=warmup, num_training_steps=30), 30)
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-15)


def test_a_warmup_below_one_is_a_share_of_the_run() -> None:
    """As in TrainingArguments: 0.1 of 30 steps are 3."""
    ours = rates(80, warmup_steps=0.1, num_train_epochs=3.0)
    theirs = rates_of(get_scheduler("linear", optimizer(), num_warmup_steps=3, num_training_steps=30), 30)
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-15)


def test_min_lr_ratio_is_where_cosine_ends() -> None:
    """transformers' cosine_with_min_lr."""
    ours = rates(80, lr_scheduler_type="cosine", warmup_steps=4.0, min_lr_ratio=0.1, max_steps=25)
    scheduler = get_scheduler(
        "cosine_with_min_lr",
        optimizer(),
        num_warmup_steps=4,
        num_training_steps=25,
        scheduler_specific_kwargs={"min_lr_rate": 0.1},
    )
    assert ours == pytest.approx(rates_of(scheduler, 25), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 10, 37, 200])
def test_one_cycle_is_that_of_torch(steps: int) -> None:
    """S2-42: OneCycleLR up to div_factor x learn_rate."""
    ours = rates(80, lr_scheduler_type="one_cycle", one_cycle_div_factor=25.0, max_steps=steps)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer(), max_lr=25 * PEAK, total_steps=steps, div_factor=25.0, cycle_momentum=False
    )
    # The scheduler refuses to be asked for a rate after its last step.
    theirs = [*rates_of(scheduler, steps - 1), float(scheduler.get_last_lr()[0])]
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-15)


def test_a_short_batch_moves_the_rate_by_its_samples() -> None:
    """The rate is a function of samples seen: after 80 and 84 of 168 samples, 88/168 and 84/168 are left."""
    ours = rates(84, num_train_epochs=2.0)
    assert len(ours) == 22
    assert ours[10:12] == pytest.approx([PEAK * 88 / 168, PEAK * 84 / 168], rel=1e-12)


def test_another_global_batch_follows_the_same_curve() -> None:
    """Where two batch sizes meet at the same number of samples, the rate is the same."""
    smaller = TrainSection(global_batch_size=8, learning_rate=PEAK, warmup_steps=0.2, num_train_epochs=1.0)
    larger = smaller.model_copy(update={"global_batch_size": 16})
    curves = [LearningRate.of(section, peak=PEAK, total_samples=160) for section in (smaller, larger)]
    for seen in range(0, 160, 16):
        assert curves[0].at(seen) == curves[1].at(seen)

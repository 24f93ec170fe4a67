"""Batches, steps and learning rates, against the tables of the guides."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.job.schedule import effective_batch, learning_rate_advice, scaled_learning_rate, steps_per_epoch


@pytest.mark.parametrize(
    ("samples", "batch", "drop_last", "steps"),
    [
        (29500, 4, True, 7375),
        (29500, 8, True, 3687),
        (29500, 16, True, 1843),
        (29500, 32, True, 921),
        (29500, 8, False, 3688),
        (5000, 16, True, 312),
        (5000, 32, True, 156),
        (5000, 64, True, 78),
        (5000, 80, True, 62),
        (5000, 96, True, 52),
        (2500, 64, False, 40),
        (2500, 64, True, 39),
        (3, 4, True, 0),
        (3, 4, False, 1),
    ],
)
def test_steps_per_epoch(samples: int, batch: int, drop_last: bool, steps: int) -> None:
    """S1-02, S1-04, S2-24 to S2-29, S4-39, X-01."""
    assert steps_per_epoch(samples, batch, drop_last) == steps


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 4096))
def test_a_dropped_batch_is_the_only_difference(samples: int, batch: int) -> None:
    """X-01: the two roundings differ by the one smaller batch, if there is one."""
    kept, dropped = steps_per_epoch(samples, batch, False), steps_per_epoch(samples, batch, True)
    assert kept - dropped == (1 if samples % batch else 0)
    assert dropped * batch <= samples <= kept * batch


@pytest.mark.parametrize(
    ("micro", "accumulation", "ranks", "batch"),
    [(1, 4, 2, 8), (1, 3, 3, 9), (1, 2, 4, 8), (8, 8, 1, 64), (16, 2, 2, 64), (1, 8, 2, 16), (8, 8, 4, 256)],
)
def test_effective_batch(micro: int, accumulation: int, ranks: int, batch: int) -> None:
    """S0-02 to S0-05, S2-03, S4-31, X-05."""
    assert effective_batch(micro, accumulation, ranks) == batch


@pytest.mark.parametrize(("batch", "rate"), [(4, 1.25e-6), (8, 2.5e-6), (16, 5e-6), (32, 1e-5)])
def test_linear_scaling(batch: int, rate: float) -> None:
    """S1-18, S1-19."""
    assert scaled_learning_rate(1.25e-6, 4, batch, "linear") == pytest.approx(rate, rel=1e-12)
    assert scaled_learning_rate(1.25e-6, 4, batch, "sqrt") == pytest.approx(1.25e-6 * math.sqrt(batch / 4), rel=1e-12)
    assert scaled_learning_rate(1.25e-6, 4, batch, "none") == 1.25e-6


def test_advice_names_the_number_and_the_three_cautions() -> None:
    """S1-18 to S1-22: scaling is advice, with its figure, and off by default."""
    assert learning_rate_advice(1.25e-6, 4, 16, "none") == [
        "learning rate left at 1.25e-06; the linear rule would give 1.25e-06 x 16/4 = 5e-06 (train.lr_scaling=linear)",
        "try the original learning rate first, and change it only if training is unstable",
        "below a global batch of 256 (here 16) linear scaling may not be needed",
        "a longer warm-up can go with a larger batch (train.warmup_steps)",
    ]


def test_applied_scaling_is_printed_as_applied() -> None:
    assert learning_rate_advice(1e-4, 64, 1024, "linear") == [
        "learning rate scaled with the batch (linear rule): 0.0001 x 1024/64 = 0.0016",
        "a longer warm-up can go with a larger batch (train.warmup_steps)",
    ]
    assert "0.0001 x sqrt(1024/64) = 0.0004" in learning_rate_advice(1e-4, 64, 1024, "sqrt")[0]


def test_there_is_no_advice_without_a_change() -> None:
    assert learning_rate_advice(1e-4, None, 8, "none") == []
    assert learning_rate_advice(1e-4, 8, 8, "linear") == []

"""Intervals and tests against figures computed elsewhere, and against what they promise."""

from __future__ import annotations

import random

import pytest

from trainwright.evaluate.statistics import bootstrap, mcnemar, paired, wilson


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval(correct: int, n: int, low: float, high: float) -> None:
    """Issue 6, scoring: the published examples."""
    assert wilson(correct, n) == pytest.approx((low, high), abs=5e-5)


def test_mcnemar_is_the_exact_binomial_test() -> None:
    """Issue 6, scoring: 1 against 9 discordant pairs is 22/1024; no discordant pair tells nothing."""
    assert mcnemar(1, 9) == mcnemar(9, 1) == pytest.approx(22 / 1024)
    assert mcnemar(0, 0) == mcnemar(4, 4) == 1
    assert mcnemar(0, 5000) < 1e-300


def test_the_bootstrap_interval_is_as_wide_as_the_normal_one() -> None:
    """Issue 6, scoring: for 400 paired differences it agrees with mean and 1.96 standard errors, and repeats."""
    chance = random.Random(5)
    differences = [chance.choice([-1.0, 0.0, 0.0, 1.0, 1.0]) for _ in range(400)]
    mean = sum(differences) / 400
    error = (sum((value - mean) ** 2 for value in differences) / 400 / 400) ** 0.5
    low, high = bootstrap(differences, seed=1)
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.01)
    assert (low, high) == bootstrap(differences, seed=1)
    assert (low, high) != bootstrap(differences, seed=2)


def test_a_clear_difference_leaves_zero_out() -> None:
    """Issue 6, scoring: pairs decide it, not two separate intervals."""
    assert paired([1.0] * 30 + [0.0] * 70, [0.0] * 100, seed=0).is_clear
    assert not paired([1.0, 0.0] * 50, [0.0, 1.0] * 50, seed=0).is_clear

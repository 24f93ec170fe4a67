"""The alert of a loss that rises: silent over days of healthy losses, prompt and single where one diverges."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from trainwright.job.schema import AlertsSection
from trainwright.watch.alerts.active_alerts import ActiveAlerts
from trainwright.watch.alerts.training import LossAndPace

LIMITS = AlertsSection()
DAY = 86_400
"""Steps of one second each."""
SAMPLED_EVERY = 4
PERIOD = 3000
"""Steps from one restart of the learning rate to the next."""

Noise = Callable[[float], float]


def fired(losses: Sequence[float | None], rates: Sequence[float] | None = None) -> list[tuple[int, str]]:
    """Show a run's losses to the alerts, a step a second; return the steps at which one fired, and its rule."""
    judge, standing, found = LossAndPace(), ActiveAlerts("n", 1), []
    for step, loss in enumerate(losses, 1):
        record = {"kind": "train", "step": step, "loss": loss, "step_s": 1.0}
        judge.add(record if rates is None else record | {"learning_rate": rates[step - 1]})
        if step % SAMPLED_EVERY == 0:
            changes = standing.update(step, judge.conditions(LIMITS))
            found += [(step, alert.rule) for alert in changes if alert.state == "fired"]
    return found


def cosine(step: int) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * (step % PERIOD) / PERIOD)


def down_to_nothing(step: int, noise: Noise) -> float:
    return 4 * math.exp(-step / 1500 + noise(0.5)) + 1e-8 * math.exp(noise(1))


def learned_by_heart(step: int, noise: Noise) -> float:
    return max(1e-9, 2.5 * math.exp(-step / 400)) * math.exp(noise(1.2))


def slow_fall(step: int, noise: Noise) -> float:
    return 0.8 + 3 / (1 + step / 300) + noise(0.15)


def noisy_plain(step: int, noise: Noise) -> float:
    return 1 + noise(0.4)


def leaps(step: int, noise: Noise) -> float:
    return 1 + noise(0.05) + (5 if step % 500 < 8 else 0)


def stairs_of_epochs(step: int, noise: Noise) -> float:
    epoch, within = divmod(step, 2000)
    return 0.3 + 1.5 * 0.6**epoch * (1 + 0.03 * within / 2000) + noise(0.05)


def two_sources(step: int, noise: Noise) -> float:
    return (0.8 if step // 25 % 2 else 2.0) + noise(0.1)


def around_nothing(step: int, noise: Noise) -> float:
    return noise(0.05)


def restarts(step: int, noise: Noise) -> float:
    return 0.5 + 3.5 * math.exp(-step / 800) + (0.7 * cosine(step) if step >= PERIOD else 0) + noise(0.08)


HEALTHY = (
    down_to_nothing,
    learned_by_heart,
    slow_fall,
    noisy_plain,
    leaps,
    stairs_of_epochs,
    two_sources,
    around_nothing,
    restarts,
)


@pytest.mark.parametrize("shape", HEALTHY)
def test_harm_10_a_day_of_a_healthy_loss_sends_nothing(shape: Callable[[int, Noise], float]) -> None:
    draw = random.Random(shape.__name__)
    losses = [shape(step, lambda sigma: draw.gauss(0, sigma)) for step in range(DAY)]
    rates = [1e-9 + 1e-3 * cosine(step) for step in range(DAY)] if shape is restarts else None
    assert fired(losses, rates) == []


def test_harm_10_a_loss_that_wanders_slowly_sends_nothing() -> None:
    """Steps that are alike for a hundred steps are no rise, though they leave the scatter within 50 far behind."""
    draw, losses, wander = random.Random(5), [], 0.0
    for _ in range(DAY):
        wander = 0.99 * wander + math.sqrt(1 - 0.99**2) * draw.gauss(0, 0.15)
        losses.append(1.2 + wander)
    assert fired(losses) == []


def test_harm_10_restarts_are_known_without_a_learning_rate_too() -> None:
    draw = random.Random(6)
    assert fired([restarts(step, lambda sigma: draw.gauss(0, sigma)) for step in range(DAY // 4)]) == []


def leap(step: int) -> float:
    return 7.0


def doubling(step: int) -> float:
    return min(12.0, 0.9 * 2 ** (step / 70))


def half_as_much_again(step: int) -> float:
    return 1.4


@pytest.mark.parametrize("noise", [0.05, 0.2])
@pytest.mark.parametrize("begins", [300, 3000, 30_000])
@pytest.mark.parametrize("diverged", [leap, doubling])
def test_harm_10_a_loss_that_diverges_is_told_once_and_soon(
    diverged: Callable[[int], float], begins: int, noise: float
) -> None:
    """Within 200 steps where the learning rate is told, and within 400 where it is not."""
    draw = random.Random(begins)
    losses = [
        (0.8 + 2.2 * math.exp(-step / 500) if step < begins else max(diverged(step - begins), 0.8))
        + draw.gauss(0, noise)
        for step in range(begins + 4000)
    ]
    for rates, most in (([1e-4 * min(1.0, (step + 1) / 200) for step in range(len(losses))], 200), (None, 400)):
        ((step, rule),) = fired(losses, rates)
        assert rule == "loss_rising" and begins < step <= begins + most


def test_harm_10_a_rise_that_stays_below_the_first_loss_is_told_once() -> None:
    draw = random.Random(7)
    losses = [(slow_fall(step, lambda sigma: draw.gauss(0, sigma)) if step < 5000 else 1.8) for step in range(9000)]
    ((step, _),) = fired(losses, [1e-4] * len(losses))
    assert 5000 < step <= 5200
    ((step, _),) = fired(losses)
    assert 5000 < step <= 6100, "without a learning rate it has to last"


def test_harm_10_a_loss_that_diverges_after_a_restart_of_the_learning_rate_is_told() -> None:
    draw = random.Random(8)
    losses = [restarts(step, lambda sigma: draw.gauss(0, sigma)) for step in range(2 * PERIOD)]
    losses += [min(9.0, losses[-1] + 0.02 * step) for step in range(1000)]
    ((step, _),) = fired(losses, [1e-9 + 1e-3 * cosine(step) for step in range(len(losses))])
    assert 2 * PERIOD < step <= 2 * PERIOD + 400


def test_harm_10_the_first_loss_is_the_runs_and_not_the_attempts() -> None:
    """An attempt that begins near the minimum of a restart does not take that for where the loss began."""
    earlier = [{"kind": "train", "step": step, "loss": 4.0} for step in range(60)]
    resumed, standing = LossAndPace(earlier), ActiveAlerts("n", 2)
    for step in range(60, 1060):
        loss, rate = (0.5, 1e-6) if step < 400 else (1.2, 1e-3)
        resumed.add({"kind": "train", "step": step, "loss": loss, "learning_rate": rate})
        assert standing.update(step, resumed.conditions(LIMITS)) == []


def test_harm_10_a_loss_that_is_not_finite_is_told_once() -> None:
    losses: list[float | None] = [2.0] * 100
    assert fired([*losses, None, *losses, None, *losses]) == [(104, "not_finite")]

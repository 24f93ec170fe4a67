"""The losses that a log or metrics.jsonl tells, and what their course says: NaN, zero, growth, swinging."""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from dataclasses import dataclass, field
from statistics import mean, median, pstdev
from typing import Final

from trainwright.doctor.literals import Sought

_KEPT: Final = 2048
_LAST: Final = 64
_NUMBER: Final = r"(?P<value>-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|-?inf|nan|NaN|NAN)"
_OF_HELD_OUT: Final = "".join(rf"(?<!{word}[_ /])" for word in ("eval", "val", "valid", "test"))
_LOSS: Final = re.compile(rf"(?<![A-Za-z]){_OF_HELD_OUT}(?:train[_/ ])?[Ll]oss['\"]?(?: is)?\s*[:= ]\s*['\"]?{_NUMBER}")
_GRADIENT: Final = re.compile(r"grad_norm['\"]?: ['\"]?(?P<value>nan|inf|-?[\d.eE+-]+)")
COMPLETED: Final = Sought.of(
    r"'?train_runtime'?\b|[Tt]raining (?:is )?(?:completed?|finished|done)|`Trainer\.fit` stopped: `max_|^finished: "
    r"|epochs? completed in |Optimizer stripped from|^Training time \d|done training in|Signaling Trainer to stop"
    r"|^[Dd]one in \d|\[after training is done\]|\*\*\* Best metric|^\s*\d+ .*\bCOMPLETED +0:0\b"
)


def loss_in(line: str) -> float | None:
    """Return the training loss that a line tells; None where there is none, or it is a summary of the whole run."""
    if "runtime" in line:
        return None
    match = _LOSS.search(line)
    return None if match is None else float(match["value"])


def gradient_in(line: str) -> float | None:
    """Return the norm of the gradient that a line tells."""
    match = _GRADIENT.search(line)
    try:
        return None if match is None else float(match["value"])
    except ValueError:
        return None


@dataclass
class Losses:
    """A course of losses, thinned so that it stays small; places are where each stood."""

    count: int = 0
    not_a_number: int = 0
    bad_gradients: int = 0
    first_not_a_number: str | None = None
    zeros_in_a_row: int = 0
    kept: list[tuple[float, str]] = field(default_factory=list)
    last: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_LAST))
    _every: int = 1

    def add(self, loss: float, place: str, gradient: float | None = None) -> None:
        """Take one loss into the course."""
        self.count += 1
        if gradient is not None and not math.isfinite(gradient):
            self.bad_gradients += 1
            self.first_not_a_number = self.first_not_a_number or place
        if not math.isfinite(loss):
            self.not_a_number += 1
            self.first_not_a_number = self.first_not_a_number or place
            return
        self.zeros_in_a_row = self.zeros_in_a_row + 1 if loss == 0.0 else 0
        self.last.append((loss, place))
        if self.count % self._every == 0:
            self.kept.append((loss, place))
            if len(self.kept) > _KEPT:
                self.kept, self._every = self.kept[::2], 2 * self._every


@dataclass(frozen=True)
class LossTrend:
    """What a course of losses is like, with its figures and the place that shows it best."""

    cause: str
    text: str
    place: str


MANY_ZEROS: Final = 10
"""A loss of exactly 0.0 so often in a row is no accident of rounding."""
ZEROS_ALONE: Final = 5
"""Fewer are enough where there is no other loss."""
LEAST_FOR_GROWTH: Final = 8
"""Growth shows itself in fewer records than swinging, as it is asked to be large."""
LEAST_FOR_A_TREND: Final = 10
GROWN: Final = 1.5
"""The end lies so many times above the best stretch (and by at least 0.5): the loss grows."""
RISEN: Final = 1.15
"""The end lies so many times above the best stretch (and by at least 0.5), and it rose from stretch to stretch."""
RISES: Final = 3
"""Stretches in a row."""
SWING: Final = 0.25
"""Mean change from one step to the next, as a share of the level; half of that is usual noise of small batches."""


def course_of(losses: Losses) -> LossTrend | None:
    """Return what is wrong with a course of losses, None where it falls, or is too short to tell."""
    return _zero(losses) or _not_finite(losses) or _growing(losses) or _swinging(losses)


def _zero(losses: Losses) -> LossTrend | None:
    # A Trainer writes 0.0 in place of NaN: after other losses it is that.
    only_zeros = losses.zeros_in_a_row == losses.count
    if losses.zeros_in_a_row < (ZEROS_ALONE if only_zeros else MANY_ZEROS):
        return None
    if losses.bad_gradients and not only_zeros:
        return None
    text = f"the loss is exactly 0.0 in the last {losses.zeros_in_a_row} of {losses.count} records"
    return LossTrend("loss-zero", text, losses.last[-1][1])


def _not_finite(losses: Losses) -> LossTrend | None:
    if not losses.not_a_number and losses.bad_gradients < 3:
        return None
    many = losses.not_a_number or losses.bad_gradients
    what = "losses" if losses.not_a_number else "gradient norms"
    return LossTrend("loss-nan", f"{many} of {losses.count} {what} are not finite", losses.first_not_a_number or "")


def _growing(losses: Losses) -> LossTrend | None:
    if len(losses.kept) < LEAST_FOR_GROWTH:
        return None
    values, recent = [loss for loss, _ in losses.kept], [loss for loss, _ in losses.last]
    window = max(4, len(values) // 8)
    levels = [mean(values[start : start + window]) for start in range(0, len(values) - window + 1, window)]
    end, best = mean(recent[-window:]), min(levels)
    rose = len(levels) > RISES and all(a < b for a, b in itertools.pairwise(levels[-RISES - 1 :]))
    if end <= (RISEN if rose else GROWN) * max(best, 1e-6) or end - best <= 0.5:
        return None
    return LossTrend("loss-divergence", f"the loss rose from {best:.4g} to {end:.4g}", losses.last[-1][1])


def _swinging(losses: Losses) -> LossTrend | None:
    if len(losses.kept) < LEAST_FOR_GROWTH:
        return None
    values = [loss for loss, _ in losses.kept[len(losses.kept) // 2 :]]  # it may fall steeply at first
    steps = [after - before for before, after in itertools.pairwise(values)]
    level = median(abs(value) for value in values) or 1.0
    swing = sum(map(abs, steps)) / len(steps) / level
    turns = sum(one * other < 0 for one, other in itertools.pairwise(steps)) / max(1, len(steps) - 1)
    half = len(values) // 2
    fallen = median(values[:half]) - median(values[half:])
    by_chance = 2 * pstdev(values) * math.sqrt(2 / half)
    falls = fallen > max(by_chance, 0.1 * level)
    if len(steps) >= LEAST_FOR_A_TREND and swing > SWING and turns > 0.5 and not falls:
        text = f"the loss changes by {swing:.0%} of its level from one record to the next and does not fall"
        return LossTrend("loss-oscillation", text, losses.last[-1][1])
    return None

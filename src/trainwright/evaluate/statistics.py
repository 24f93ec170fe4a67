"""How sure a figure is: Wilson's interval, McNemar's exact test, and the bootstrap of a paired difference."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""
RESAMPLES = 2000


def wilson(correct: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson, JASA 22, 1927); (0, 1) for no observation."""
    if not n:
        return 0.0, 1.0
    share, z2 = correct / n, Z_95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided exact p of McNemar's test, from the pairs that only one of two got right."""
    n = only_first + only_second
    tail = sum(math.comb(n, count) for count in range(min(only_first, only_second) + 1))
    return min(2 * tail / (1 << n), 1.0)


def bootstrap(differences: Sequence[float], *, seed: int, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of paired differences; the same for the same seed."""
    chance = random.Random(f"bootstrap/{seed}")
    n = len(differences)
    means = sorted(math.fsum(chance.choices(differences, k=n)) / n for _ in range(resamples))
    return means[int(0.025 * (resamples - 1))], means[math.ceil(0.975 * (resamples - 1))]


@dataclass(frozen=True)
class PairedDifference:
    """Two policies on the same questions, the first less the second."""

    mean: float
    low: float
    high: float
    """The 95 % interval."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def paired(first: Sequence[float], second: Sequence[float], *, seed: int) -> PairedDifference:
    """Return the mean difference of pairs with its bootstrap interval."""
    differences = [one - other for one, other in zip(first, second, strict=True)]
    return PairedDifference(math.fsum(differences) / len(differences), *bootstrap(differences, seed=seed))

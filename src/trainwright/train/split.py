"""Who computes which samples of a step: in equal parts, or in parts that fit the ranks' speeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainwright.job.schedule import apportion

Samples = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """How a step is shared: `weights` has one number a rank, `at_once` the samples that it takes in one pass at most.

    Weights of a whole global batch are samples. The loss is divided by the targets of the whole batch, so that the
    gradient is the same however its samples are shared.
    """

    weights: tuple[int, ...]
    at_once: tuple[int, ...]

    def counts(self, samples: int) -> list[int]:
        """Return how many of so many samples each rank gets."""
        return apportion(samples, self.weights)

    def parts(self, samples: Samples, rank: int, *, spread: bool) -> list[Samples]:
        """Return a rank's samples of each micro-step; every rank has the same number of micro-steps.

        With `spread` each of them is shared by the weights, for strategies under which ranks wait for each other in
        every pass. Without, a rank needs as few as its memory allows, and those without a sample come first: the last
        one, in which the gradients are exchanged, has one if the rank has any.
        """
        counts = self.counts(len(samples))
        needed = [-(-count // most) for count, most in zip(counts, self.at_once, strict=True)]
        steps = max(*needed, 1)
        own = steps if spread else max(needed[rank], 1)
        start = sum(counts[:rank])
        parts = np.array_split(samples[start : start + counts[rank]], own)[::-1]
        return [samples[:0]] * (steps - own) + parts

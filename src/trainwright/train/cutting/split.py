"""Who computes which samples of a step: in equal parts, or in parts that fit the ranks' speeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainwright.job.schedule import apportion
from trainwright.train.cutting.dealing import deal

Samples = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """How a step is shared: `weights` has one number a rank, `at_once` the samples that it takes in one pass at most.

    Weights of a whole global batch are samples. The loss is divided by the targets of the whole batch, so that the
    gradient is the same however its samples are shared. Samples of like length come together, which leaves little
    padding, unless `in_order`: then they stay in the order given.
    """

    weights: tuple[int, ...]
    at_once: tuple[int, ...]
    in_order: bool = False

    def counts(self, samples: int) -> list[int]:
        """Return how many of so many samples each rank gets."""
        return apportion(samples, self.weights)

    def parts(self, samples: Samples, lengths: npt.NDArray[np.integer], *, spread: bool) -> list[list[Samples]]:
        """Return the samples of each rank's micro-steps, as many on every rank; `lengths` are the samples', in tokens.

        With `spread` each micro-step is shared by the weights, for strategies under which ranks wait for each other in
        every pass. Without, a rank needs as few as its memory allows. Micro-steps without a sample come first: the last
        one, in which the gradients are exchanged, has one if the rank has any. Of the others the first has the longest
        samples, so that what follows finds its memory made, and then they rise, so that the last is long enough to
        exchange gradients beside it.
        """
        counts = self.counts(len(samples))
        needed = [-(-count // most) for count, most in zip(counts, self.at_once, strict=True)]
        steps = max(*needed, 1)
        sizes = [_sizes(count, steps if spread else own) for count, own in zip(counts, needed, strict=True)]
        known = np.zeros_like(lengths) if self.in_order else lengths
        dealt = deal(known, sizes, self.weights, together=spread)
        return [[samples[piece] for piece in _arranged(pieces, steps)] for pieces in dealt]


def _sizes(count: int, pieces: int) -> list[int]:
    """Return the sizes of pieces that differ by one at most, the smallest first."""
    return [(count + index) // pieces for index in range(pieces)]


def _arranged(pieces: list[Samples], steps: int) -> list[Samples]:
    """Return the pieces as micro-steps: the longest, then from the shortest up; empty ones before."""
    filled = [piece for piece in pieces if len(piece)]
    empty = np.zeros(0, dtype=np.int64)
    return [empty] * (steps - len(filled)) + filled[:1] + filled[:0:-1]

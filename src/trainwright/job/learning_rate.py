"""The learning rate as a function of samples seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainwright.job.schema import TrainSection


@dataclass(frozen=True)
class LearningRate:
    """A curve over samples, so that it does not move when the number of samples in a step does.

    With whole batches it equals the step-based curves of transformers' `optimization.py`: at step k,
    `samples_seen = k * global_batch_size`. `one_cycle` is torch's OneCycleLR with its defaults (cosine, 30 % rising,
    final_div_factor 1e4), from learning_rate up to learning_rate * div_factor.
    """

    shape: str
    peak: float
    step_samples: int
    warmup_samples: float
    total_samples: int
    min_ratio: float
    div_factor: float

    @classmethod
    def of(cls, train: TrainSection, *, peak: float, total_samples: int) -> LearningRate:
        """Return the curve of a schedule; `peak` is the learning rate after any scaling."""
        warmup = train.warmup_steps
        return cls(
            shape=train.lr_scheduler_type,
            peak=peak,
            step_samples=train.global_batch_size,
            warmup_samples=warmup * total_samples if warmup < 1 else warmup * train.global_batch_size,
            total_samples=total_samples,
            min_ratio=train.min_lr_ratio,
            div_factor=train.one_cycle_div_factor,
        )

    def at(self, samples_seen: int) -> float:
        """Return the learning rate of the optimizer step that begins after `samples_seen` samples."""
        if self.shape == "one_cycle":
            return self._one_cycle(samples_seen)
        if self.shape != "constant" and samples_seen < self.warmup_samples:
            return self.peak * samples_seen / self.warmup_samples
        if self.shape in ("constant", "constant_with_warmup"):
            return self.peak
        progress = (samples_seen - self.warmup_samples) / max(1.0, self.total_samples - self.warmup_samples)
        progress = min(progress, 1.0)
        remaining = 1 - progress if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * remaining)

    def _one_cycle(self, samples_seen: int) -> float:
        top, start = self.peak * self.div_factor, self.peak
        # torch counts to the last step's beginning: the top is one step before 30 %, the end one before the last.
        rising, last = 0.3 * self.total_samples - self.step_samples, self.total_samples - self.step_samples
        if samples_seen < rising:
            return _cosine(start, top, samples_seen / rising)
        return _cosine(top, start / 1e4, min(1.0, (samples_seen - rising) / (last - rising)))


def _cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * 0.5 * (1 + math.cos(math.pi * share))

"""The course of a run: which samples each optimizer step takes, when it evaluates and saves, and where it ends.

A position is counted in *samples seen*, so that it survives another number of ranks, micro-batch or accumulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.errors import UserError
from trainwright.job.schedule import steps_per_epoch
from trainwright.job.schema import Interval, TrainSection


@dataclass(frozen=True)
class Position:
    """Where a run is: optimizer steps done, the epoch under way, samples seen in it and in all."""

    step: int = 0
    epoch: int = 0
    epoch_samples: int = 0
    samples_seen: int = 0


@dataclass(frozen=True)
class Batch:
    """One optimizer step: samples `start` to `stop` of the order of `epoch`, and the positions around it."""

    epoch: int
    start: int
    stop: int
    before: Position
    after: Position


@dataclass(frozen=True)
class BatchSchedule:
    """All batches of a run, from the number of samples and the schedule alone."""

    samples: int
    global_batch_size: int
    drop_last: bool
    num_train_epochs: float
    max_steps: int | None

    @classmethod
    def of(cls, train: TrainSection, *, samples: int) -> BatchSchedule:
        """Return the course of a job's schedule over `samples` samples; UserError if there is not one step in it."""
        if steps_per_epoch(samples, train.global_batch_size, train.drop_last) == 0:
            raise UserError(
                f"{samples} samples do not fill one batch of train.global_batch_size={train.global_batch_size}",
                hints=["train.drop_last=false trains on the smaller batch too", "or lower train.global_batch_size"],
            )
        return cls(samples, train.global_batch_size, train.drop_last, train.num_train_epochs, train.max_steps)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        return steps_per_epoch(self.samples, self.global_batch_size, self.drop_last)

    @property
    def samples_per_epoch(self) -> int:
        """Samples that one epoch trains on; `drop_last` leaves out those that fill no batch."""
        return self.steps_per_epoch * self.global_batch_size if self.drop_last else self.samples

    @property
    def total_steps(self) -> int:
        """Optimizer steps of a whole run at this global batch; see `total_steps_from` for one that had another."""
        if self.max_steps is not None:
            return self.max_steps
        # Rounded first: 0.7 epochs of 10 steps are 7, although 0.7 * 10 is a hair more in binary.
        return math.ceil(round(self.num_train_epochs * self.steps_per_epoch, 6))

    @property
    def end(self) -> tuple[int, int]:
        """The epoch and the samples seen in it at which the run ends, `max_steps` aside."""
        epochs, steps = divmod(self.total_steps, self.steps_per_epoch)
        return epochs, min(steps * self.global_batch_size, self.samples_per_epoch)

    @property
    def total_samples(self) -> int:
        """Samples that the whole run sees."""
        epochs, samples = self.end
        return epochs * self.samples_per_epoch + samples

    def total_steps_from(self, position: Position) -> int:
        """Return the optimizer steps of the run that stands at `position`: those done, however large their batches
        were, and those that the remaining samples need at this global batch.
        """
        if self.max_steps is not None:
            return max(self.max_steps, position.step)
        here, (last_epoch, last_samples) = self._at_batch(position), self.end
        if here.epoch > last_epoch:
            return here.step
        left = steps_per_epoch(self.samples - here.epoch_samples, self.global_batch_size, self.drop_last)
        if here.epoch == last_epoch:
            to_end = math.ceil(max(0, last_samples - here.epoch_samples) / self.global_batch_size)
            return here.step + min(left, to_end)
        whole_epochs = (last_epoch - here.epoch - 1) * self.steps_per_epoch
        return here.step + left + whole_epochs + math.ceil(last_samples / self.global_batch_size)

    def _at_batch(self, position: Position) -> Position:
        left = self.samples - position.epoch_samples
        if left <= 0 or (self.drop_last and left < self.global_batch_size):
            return Position(position.step, position.epoch + 1, 0, position.samples_seen)
        return position

    def is_finished(self, position: Position) -> bool:
        """Say whether nothing is left to train on at `position`."""
        if self.max_steps is not None:
            return position.step >= self.max_steps
        here = self._at_batch(position)
        return (here.epoch, here.epoch_samples) >= self.end

    def batches(self, position: Position) -> Iterator[Batch]:
        """Yield the remaining batches, in order, from `position` on."""
        while not self.is_finished(position):
            position = self._at_batch(position)
            stop = min(position.epoch_samples + self.global_batch_size, self.samples)
            if self.max_steps is None and position.epoch == self.end[0]:
                stop = min(stop, self.end[1])
            size = stop - position.epoch_samples
            after = Position(position.step + 1, position.epoch, stop, position.samples_seen + size)
            yield Batch(position.epoch, position.epoch_samples, stop, position, after)
            position = after

    def epochs_done(self, position: Position) -> float:
        """Return the progress in epochs, with fractions; an epoch whose rest is dropped counts as whole."""
        return position.epoch + min(position.epoch_samples / self.samples_per_epoch, 1.0)

    def is_due(self, every: Interval, batch: Batch) -> bool:
        """Say whether something that happens `every` so often is due after `batch`."""
        if every.unit == "step":
            return batch.after.step % int(every.value) == 0
        # A hair is added so that 0.1 epochs ten times over is one epoch whatever the rounding.
        hair = 0.5 / self.samples_per_epoch
        before, after = (math.floor((self.epochs_done(p) + hair) / every.value) for p in (batch.before, batch.after))
        return after > before

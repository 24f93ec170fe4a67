"""The loss on held-out data, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainwright.train.assignment import Assignment
from trainwright.train.cutting.dealing import longest_first
from trainwright.train.data.dataset import TokenDataset
from trainwright.train.feeding import Feed, Samples
from trainwright.train.precision import autocast
from trainwright.train.ranks import Ranks
from trainwright.train.step_timer import Sections
from trainwright.train.stopping import StopRequest
from trainwright.train.strategies.protocol import Strategy
from trainwright.train.tasks.protocol import Task

STOP_CHECK_PASSES = 20


@dataclass(frozen=True)
class Evaluation:
    """Mean loss for each target token of the held-out samples, each counted once."""

    loss: float
    targets: int

    @property
    def perplexity(self) -> float:
        """exp(loss); inf where that is too large to say."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(
    strategy: Strategy,
    task: Task,
    data: TokenDataset,
    ranks: Ranks,
    assignment: Assignment,
    stop: StopRequest,
    sections: Sections,
    *,
    limit: int | None,
) -> Evaluation | None:
    """Return the loss over the first `limit` held-out samples, or None if a rank was asked to stop meanwhile."""
    samples = _held_out(data, limit)
    passes = -(-len(samples) // (assignment.eval_batch_size * ranks.world_size))
    parts = [np.array_split(together, ranks.world_size)[ranks.rank] for together in np.array_split(samples, passes)]
    # A rank whose part is empty goes through the pass all the same, with a sample that counts for nothing.
    fed = [part if len(part) else samples[-1:] for part in parts]
    loss_sum = torch.zeros(
        (), dtype=torch.float32 if ranks.device.type == "mps" else torch.float64, device=ranks.device
    )
    for index, loss in enumerate(_losses(strategy, task, data, ranks, assignment, fed)):
        sections.gets_on()
        if len(parts[index]):
            loss_sum += loss.double() if loss_sum.dtype == torch.float64 else loss
        if (index + 1) % STOP_CHECK_PASSES == 0 and ranks.sum([float(stop.requested)])[0] > 0:
            return None
    targets = int(data.targets[samples].sum())
    return Evaluation(ranks.sum([float(loss_sum)])[0] / targets, targets)


def rehearse(
    strategy: Strategy, task: Task, data: TokenDataset, ranks: Ranks, assignment: Assignment, *, limit: int | None
) -> None:
    """Go once through the longest held-out samples that a pass can hold, for the memory that it takes."""
    longest = _held_out(data, limit)[: assignment.eval_batch_size]
    for _ in _losses(strategy, task, data, ranks, assignment, [longest]):
        pass


def _held_out(data: TokenDataset, limit: int | None) -> Samples:
    """Return the first `limit` samples, the longest first: those of a pass are of like length."""
    return longest_first(data.lengths[: limit or len(data)])


def _losses(
    strategy: Strategy,
    task: Task,
    data: TokenDataset,
    ranks: Ranks,
    assignment: Assignment,
    parts: Sequence[Samples],
) -> Iterator[torch.Tensor]:
    """Yield the sum of the losses of each part, with the model as it predicts."""
    feed = Feed(data, task, ranks.device)
    was_training = strategy.forward.training
    strategy.forward.eval()
    try:
        for _, batch in feed.batches(parts):
            with torch.no_grad(), autocast(ranks.device, assignment.precision):
                loss = task.loss_sum(strategy.forward, batch)
            yield loss
    finally:
        strategy.forward.train(was_training)
        feed.close()

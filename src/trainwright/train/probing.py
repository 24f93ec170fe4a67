"""A probe: a few steps at one micro-batch after the other, the smallest first, and what each of them took.

For `trainwright tune`. What a rank found is written down at once, line by line, so that a micro-batch whose memory does
not suffice, or a rank that is killed, costs only what comes after it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from trainwright.job.batch_schedule import Batch, Position
from trainwright.runs.records import append
from trainwright.train.balance import Balance
from trainwright.train.console import StepPace, say
from trainwright.train.cutting.dealing import longest_first, typical
from trainwright.train.cutting.split import Split
from trainwright.train.data.order import epoch_order
from trainwright.train.evaluation import rehearse
from trainwright.train.feeding import Feed, Samples
from trainwright.train.loop import StepLoop
from trainwright.train.memory import RunningOut
from trainwright.train.peaks import PEAKS, RankPeak
from trainwright.train.saving import ADAPTER_STEM, OPTIMIZER_STEM, weights_stem
from trainwright.train.tensors import ShardWriter

PASSES_FOR_MEMORY = 2
"""Micro-steps of the step whose memory counts: from the second on the gradients are there already."""
LEAST_TIMED_S, MOST_TIMED_STEPS = 0.3, 30
"""Steps of milliseconds are repeated for so long: what else the machine does holds up all that fall into its while."""


def probe(loop: StepLoop, wanted: Mapping[str, Any]) -> None:
    """Go through the steps that `wanted` names, and then through an evaluation and what a checkpoint gathers.

    `micro_batch_sizes` rise, or some take turns; `evaluation_batch_sizes` rise. Memory is that of the longest samples.
    The time at a micro-batch is the best of `timed_steps` steps or more, all on the same `timed_samples` samples of
    the run's first step, whose mean length is that of the step: what else the machine does makes a step longer and
    never shorter. `spread` says how much it does.

    Raises:
        OutOfMemoryError: the memory of this rank did not suffice.
    """
    RankProbe(loop, wanted).run()


class RankProbe:
    """One rank's part of a probe."""

    def __init__(self, loop: StepLoop, wanted: Mapping[str, Any]) -> None:
        self._loop, self._wanted = loop, wanted
        assignment, self._device = loop.assignment, loop.ranks.device
        self._world_size = assignment.world_size
        self._lines: Path = loop.folder.attempt_dir(assignment.attempt) / f"rank_{assignment.rank}.probe.jsonl"
        self._peak: RankPeak = PEAKS[self._device.type](self._device, wanted["host_bytes"])
        self._needed: dict[int, int] = {}
        """Bytes by micro-batch; where some take turns, their memory is that of the first."""
        self._longest = longest_first(loop.train_data.lengths)
        self._usual = self._usual_samples()
        self._feed = Feed(loop.train_data, loop.task, self._device)

    def run(self) -> None:
        """Climb the micro-batches, then evaluate, then gather a checkpoint."""
        try:
            with RunningOut("training", self._device):
                for micro in self._wanted["micro_batch_sizes"]:
                    self._note("began", micro_batch_size=micro)
                    self._rung(micro)
        finally:
            self._feed.close()
        with RunningOut("evaluation", self._device):
            for size in self._wanted["evaluation_batch_sizes"] if self._loop.eval_data is not None else ():
                self._evaluate(size)
        with RunningOut("saving", self._device):
            self._gather()

    def longest_step(self, micro: int) -> None:
        """Do a step that needs as much memory as any of this micro-batch can.

        Its samples are the longest, again and again: any rank may meet them, and in any part of a step.
        """
        ranks = self._world_size
        share = -(-self._loop.job.train.global_batch_size // ranks)
        passes = min(PASSES_FOR_MEMORY, -(-share // micro))
        self._cut_into(micro, in_order=True)
        self._step(np.resize(self._longest[:micro], passes * micro * ranks))

    def _cut_into(self, micro: int, *, in_order: bool = False) -> None:
        ranks = self._world_size
        split = Split((1,) * ranks, (micro,) * ranks, in_order)
        self._loop.balance = Balance(split, self._loop.ranks, None, settled=True)

    def _usual_samples(self) -> Samples:
        """Return the samples of the steps that are timed.

        Those of a pass are of like length in training, and so they are here, where fewer samples make a step.
        """
        loop = self._loop
        order = epoch_order(loop.job.train.seed, 0, len(loop.train_data))
        batch = np.resize(order, loop.job.train.global_batch_size)
        return batch[typical(loop.train_data.lengths[batch], self._wanted["timed_samples"])]

    def _rung(self, micro: int) -> None:
        if micro not in self._needed:
            self._needed[micro] = self._needed_bytes(micro)
        timed = self._timed_steps(micro)
        step_s, once_s = min(timed)
        self._note(
            "measured",
            micro_batch_size=micro,
            needed_bytes=self._needed[micro],
            capacity_bytes=self._peak.capacity_bytes,
            step_s=step_s,
            once_s=once_s,
            spread=median(step_s for step_s, _ in timed) / step_s - 1,
            timed_steps=len(timed),
            longest=int(self._loop.train_data.lengths.max()),
        )

    def _needed_bytes(self, micro: int) -> int:
        if not self._needed:
            self.longest_step(micro)  # makes the optimizer's states, and loads kernels
        self._peak.restart()
        self.longest_step(micro)
        needed = self._peak.needed_bytes()
        if self._loop.ranks.is_first:
            say(f"micro-batch {micro}: {needed / 2**30:.2f} GiB")
        return needed

    def _timed_steps(self, micro: int) -> list[tuple[float, float]]:
        """Time steps, as many on every rank."""
        self._cut_into(micro)
        timed = [self._timed_step() for _ in range(self._wanted["timed_steps"])]
        [summed_s] = self._loop.ranks.sum([sum(step_s for step_s, _ in timed)])
        mean_s = summed_s / (self._world_size * len(timed))
        wanted = min(MOST_TIMED_STEPS, math.ceil(LEAST_TIMED_S / mean_s))
        return timed + [self._timed_step() for _ in range(wanted - len(timed))]

    def _timed_step(self) -> tuple[float, float]:
        """Return the seconds of a step, and those of them that it takes once however many passes it has."""
        once_before, began_s = self._once_s(), time.perf_counter()
        self._step(self._usual)
        once_s = self._once_s() - once_before
        return time.perf_counter() - began_s, once_s

    def _once_s(self) -> float:
        """Return the seconds so far in the optimizer and in waiting for the gradients of others."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._loop.sections.drain()
        seconds = self._loop.sections.seconds
        return seconds["optimizer"] + seconds["communication"]

    def _step(self, samples: Samples) -> None:
        loop, before = self._loop, self._loop.position
        loop.order = (0, samples)
        after = Position(before.step + 1, 0, 0, before.samples_seen + len(samples))
        loop.step(Batch(0, 0, len(samples), before, after), self._feed, StepPace())
        loop.position = after

    def _evaluate(self, size: int) -> None:
        loop = self._loop
        assert loop.eval_data is not None
        self._peak.restart()
        assignment = dataclasses.replace(loop.assignment, eval_batch_size=size)
        rehearse(loop.strategy, loop.task, loop.eval_data, loop.ranks, assignment, limit=loop.job.eval.limit)
        self._note("evaluated", batch_size=size, needed_bytes=self._peak.needed_bytes())

    def _gather(self) -> None:
        """Bring together what a checkpoint holds, as saving it does; nothing is written."""
        loop, ranks = self._loop, self._loop.ranks
        self._peak.restart()
        for stem, tensors in (
            (weights_stem(loop.strategy), loop.strategy.gather_weights()),
            (OPTIMIZER_STEM, loop.strategy.gather_optimizer()),
        ):
            ShardWriter(stem, rank=ranks.rank, shards=1 if stem == ADAPTER_STEM else ranks.world_size).collect(tensors)
        self._note("gathered", needed_bytes=self._peak.needed_bytes())

    def _note(self, what: str, **figures: Any) -> None:
        append(self._lines, {"what": what, **figures})

"""A Layout: one way to run a Job on an Inventory, which checks itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainwright.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Devices, strategy, batches and precision of a run; batch sizes in samples.

    `visible_devices` is what CUDA_VISIBLE_DEVICES of the ranks will be, None off CUDA. `rank_samples` of a global batch
    are computed by each rank, `rank_micro_batch_sizes` at once, where the ranks are not alike; else both are empty, and
    `micro_batch_size` is that of all. It is the largest of them otherwise. Under FSDP2 ranks keep whole gradients until
    the last micro-batch of a step reduces them, or, with `sync_each_micro_batch`, reduce them in every one.

    Raises:
        UserError: the parts contradict each other; the failing equation is shown with its numbers.
    """

    device: str
    visible_devices: str | None
    ranks: int
    strategy: str
    precision: str
    offload: str
    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    eval_batch_size: int
    gradient_checkpointing: bool
    rank_samples: tuple[int, ...] = ()
    rank_micro_batch_sizes: tuple[int, ...] = ()
    sync_each_micro_batch: bool = False

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Layout:
        """Return the layout that plan.json holds."""
        lists = ("rank_samples", "rank_micro_batch_sizes")
        return cls(**{**stored, **{name: tuple(stored.get(name, ())) for name in lists}})

    def __post_init__(self) -> None:
        found = (self._batch(), self._strategy(), self._offload(), self._sync())
        problems = [problem for problem in found if problem]
        if problems:
            raise UserError("this layout cannot run", problems=problems)

    def with_micro_batch(self, micro_batch_size: int) -> Layout:
        """Return the layout with another micro-batch and the accumulation that keeps the global batch."""
        shrunk = [size * micro_batch_size // self.micro_batch_size for size in self.rank_micro_batch_sizes]
        at_once = tuple(max(1, size) for size in shrunk)
        if at_once:
            steps = _micro_steps(self.rank_samples, at_once)
        else:
            steps = -(-self.global_batch_size // (micro_batch_size * self.ranks))
        return replace(
            self,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=steps,
            rank_micro_batch_sizes=at_once,
            sync_each_micro_batch=self.sync_each_micro_batch and steps > 1,
        )

    def _batch(self) -> str | None:
        if self.rank_samples or self.rank_micro_batch_sizes:
            return self._uneven_batch()
        micro, accumulation, ranks = self.micro_batch_size, self.gradient_accumulation_steps, self.ranks
        product = micro * accumulation * ranks
        equation = f"micro-batch x accumulation x ranks = {micro} x {accumulation} x {ranks} = {product}"
        if product < self.global_batch_size:
            return f"{equation}, but train.global_batch_size = {self.global_batch_size}"
        if micro * (accumulation - 1) * ranks >= self.global_batch_size:
            return f"{equation}, more than the train.global_batch_size = {self.global_batch_size} needs"
        return None

    def _uneven_batch(self) -> str | None:
        samples, at_once = self.rank_samples, self.rank_micro_batch_sizes
        if not len(samples) == len(at_once) == self.ranks:
            return f"{self.ranks} ranks, but shares of {len(samples)} and micro-batches of {len(at_once)}"
        if sum(samples) != self.global_batch_size:
            shares = " + ".join(map(str, samples))
            return f"the ranks' shares {shares} are not train.global_batch_size = {self.global_batch_size}"
        if max(at_once) != self.micro_batch_size:
            return f"the largest micro-batch is {max(at_once)}, not {self.micro_batch_size}"
        steps = _micro_steps(samples, at_once)
        if steps != self.gradient_accumulation_steps:
            return f"the ranks' shares take {steps} micro-steps, not {self.gradient_accumulation_steps}"
        return None

    def _strategy(self) -> str | None:
        if self.strategy == "single":
            return None if self.ranks == 1 else f"resources.strategy=single runs 1 rank, not {self.ranks}: use `ddp`"
        if self.ranks > 1 or self.strategy.startswith("zero"):
            return None
        return f"resources.strategy={self.strategy} shares work among ranks, and there is 1: use `single`"

    def _offload(self) -> str | None:
        if self.offload == "none" or self.strategy in ("zero1", "zero2", "zero3"):
            if self.offload == "optimizer+parameters" and self.strategy != "zero3":
                return f"resources.offload=optimizer+parameters needs resources.strategy=zero3, not {self.strategy}"
            return None
        return f"resources.offload={self.offload} is done by ZeRO; resources.strategy={self.strategy} has none"

    def _sync(self) -> str | None:
        if self.sync_each_micro_batch and self.strategy != "fsdp2":
            return f"train.sync_each_micro_batch is a choice under fsdp2, and resources.strategy={self.strategy}"
        return None


def _micro_steps(samples: Sequence[int], at_once: Sequence[int]) -> int:
    """Return how many micro-steps the rank with the most of them needs."""
    return max(-(-share // most) for share, most in zip(samples, at_once, strict=True))

"""A Layout: one way to run a Job on an Inventory, which checks itself."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Devices, strategy, batches and precision of a run; batch sizes in samples.

    `visible_devices` is what CUDA_VISIBLE_DEVICES of the ranks will be, None off CUDA.

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

    def __post_init__(self) -> None:
        problems = [problem for problem in (self._batch(), self._strategy(), self._offload()) if problem]
        if problems:
            raise UserError("this layout cannot run", problems=problems)

    def _batch(self) -> str | None:
        micro, accumulation, ranks = self.micro_batch_size, self.gradient_accumulation_steps, self.ranks
        product = micro * accumulation * ranks
        equation = f"micro-batch x accumulation x ranks = {micro} x {accumulation} x {ranks} = {product}"
        if product < self.global_batch_size:
            return f"{equation}, but train.global_batch_size = {self.global_batch_size}"
        if micro * (accumulation - 1) * ranks >= self.global_batch_size:
            return f"{equation}, more than the train.global_batch_size = {self.global_batch_size} needs"
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

"""A user's own task that goes wrong where its options say: `task: faulty_task:Faulty`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.job.schema import Job
from trainwright.train.tasks.causal_lm import CausalLM

if TYPE_CHECKING:
    import torch


class Faulty(CausalLM):
    """causal-lm in which one rank, at its `step`-th training micro-step, raises, makes a NaN, or sleeps.

    `sleep` holds only while `while_file` exists.
    """

    def __init__(
        self, job: Job, tokenizer: Any, *, fault: str, step: int, rank: int = 0, while_file: str | None = None
    ) -> None:
        super().__init__(job, tokenizer)
        self._fault, self._step, self._rank, self._while_file = fault, step, rank, while_file
        self._steps = 0

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss, or what is asked for instead."""
        loss = super().loss_sum(model, batch)
        self._steps += model.training
        if not model.training or os.environ["RANK"] != str(self._rank) or self._steps != self._step:
            return loss
        if self._fault == "raise":
            raise ZeroDivisionError("the seventh row is not what it seems")
        if self._fault == "nan":
            return loss * float("nan")
        while self._while_file is not None and Path(self._while_file).exists():
            time.sleep(0.05)
        return loss

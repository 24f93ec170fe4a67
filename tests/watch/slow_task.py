"""A user's own task whose passes take a while, so that a watched run leaves the machine to those who watch it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from trainwright.job.schema import Job
from trainwright.train.tasks.causal_lm import CausalLM

if TYPE_CHECKING:
    import torch


class Slow(CausalLM):
    """causal-lm that rests `pause_s` in each pass."""

    def __init__(self, job: Job, tokenizer: Any, *, pause_s: float) -> None:
        super().__init__(job, tokenizer)
        self._pause_s = pause_s

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of causal-lm."""
        time.sleep(self._pause_s)
        return super().loss_sum(model, batch)

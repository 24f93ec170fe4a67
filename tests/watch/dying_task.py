"""A user's own task that raises in its third step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.job.schema import Job
from trainwright.train.tasks.causal_lm import CausalLM

if TYPE_CHECKING:
    import torch


class Dying(CausalLM):
    """causal-lm of which every rank finds fault with its third batch."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        super().__init__(job, tokenizer)
        self._batches = 0

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of causal-lm, twice."""
        self._batches += 1
        if self._batches == 3:
            raise ValueError("the batch makes no sense")
        return super().loss_sum(model, batch)

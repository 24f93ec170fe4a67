"""A user's own task under which one rank computes slowly: `task: slowed_task:Slowed`."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from trainwright.job.schema import Job
from trainwright.train.tasks.causal_lm import CausalLM

if TYPE_CHECKING:
    import torch
    from torch import nn


class Slowed(CausalLM):
    """causal-lm in which the ranks named take `sample_s` longer for each sample, in the midst of a layer."""

    def __init__(self, job: Job, tokenizer: Any, *, ranks: list[int], sample_s: float) -> None:
        super().__init__(job, tokenizer)
        self._ranks = ranks
        self._sample_s = sample_s
        self._hooked = False

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        if int(os.environ["RANK"]) in self._ranks and not self._hooked:
            # The model is wrapped by now: the first of the layers inside, wherever it is.
            first = next(layer for layer in model.modules() if type(layer).__name__ == "LlamaMLP")
            first.register_forward_hook(self._wait)
            self._hooked = True
        return super().loss_sum(model, batch)

    def _wait(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if module.training:
            time.sleep(self._sample_s * len(output))

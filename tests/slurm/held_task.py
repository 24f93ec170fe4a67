"""A user's own task that waits for the test: `task: held_task:Held`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.job.schema import Job
from trainwright.train.stopping import StopRequest
from trainwright.train.tasks.causal_lm import CausalLM

if TYPE_CHECKING:
    import torch

HELD_AT = 4


class Held(CausalLM):
    """causal-lm in which rank 0 waits in its fourth training micro-step of every attempt.

    It goes on when it is asked to stop, or once `gate/attempt_N` exists.
    """

    def __init__(self, job: Job, tokenizer: Any, *, gate: str) -> None:
        super().__init__(job, tokenizer)
        self._gate = Path(gate)
        self._steps = 0

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss, when it is time."""
        self._steps += model.training
        if self._steps == HELD_AT and os.environ["RANK"] == "0":
            opened = self._gate / f"attempt_{os.environ['TRAINWRIGHT_ATTEMPT']}"
            while not opened.exists() and not _asked_to_stop():
                time.sleep(0.05)
        return super().loss_sum(model, batch)


def _asked_to_stop() -> bool:
    asked = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    assert isinstance(asked, StopRequest)
    return asked.requested

"""A user's own task with a probe that is killed or hangs on one of its ranks: `task: harmed_task:Harmed`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from hungry_task import Hungry

from trainwright.job.schema import Job


class Harmed(Hungry):
    """The hungry task, whose first attempt is killed (`harm: kill`) or stands still (`harm: hang`) on `harmed_rank`."""

    def __init__(
        self, job: Job, tokenizer: Any, *, harm: str | None = None, harmed_rank: int = 0, **hungry: Any
    ) -> None:
        super().__init__(job, tokenizer, **hungry)
        self._harm, self._harmed_rank = harm, harmed_rank

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of the hungry task, if it comes to it."""
        if os.environ["TRAINWRIGHT_ATTEMPT"] == "1" and int(os.environ["RANK"]) == self._harmed_rank:
            if self._harm == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._harm == "hang":
                time.sleep(3600)
        return super().loss_sum(model, batch)

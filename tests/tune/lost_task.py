"""A user's own task whose first probes are lost: `task: lost_task:Lost`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.train.tasks.causal_lm import CausalLM

if TYPE_CHECKING:
    import torch


class Lost(CausalLM):
    """causal-lm that is killed at once in the first attempt, and in the second waits for ever at a batch of four."""

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of causal-lm, if it comes to it."""
        attempt = int(os.environ["TRAINWRIGHT_ATTEMPT"])
        if attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 2 and len(batch["input_ids"]) == 4:
            (Path(sys.argv[1]) / "hangs").touch()
            time.sleep(3600)
        return super().loss_sum(model, batch)

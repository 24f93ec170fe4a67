"""A user's own task that writes down what the model was shown: `task: recording_task:Recording`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.job.schema import Job
from trainwright.train.tasks.causal_lm import CausalLM

if TYPE_CHECKING:
    import torch


class Recording(CausalLM):
    """causal-lm that records the rows of every training pass in the run folder, and takes `pause_s` for each pass."""

    def __init__(self, job: Job, tokenizer: Any, *, pause_s: float) -> None:
        super().__init__(job, tokenizer)
        self._pause_s, self._pad = pause_s, tokenizer.pad_token_id

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of causal-lm."""
        if model.training:
            rows = [tokens[tokens != self._pad].tolist() for tokens in batch["input_ids"]]
            name = f"shown-{os.environ['TRAINWRIGHT_ATTEMPT']}-{os.environ['RANK']}.jsonl"
            with (Path(sys.argv[1]) / name).open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            time.sleep(self._pause_s)
        return super().loss_sum(model, batch)

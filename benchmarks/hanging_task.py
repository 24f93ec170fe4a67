"""A user's own task that hangs where its options say: `task: hanging_task:Hanging`."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from trainwright.job.schema import Job
from trainwright.train.tasks.causal_lm import CausalLM

FOREVER_S = 10_000


class Hanging(CausalLM):
    """causal-lm in which one rank, from its `step`-th training pass on, does what `fault` says.

    `pass_s` is what every pass takes besides; `slow_s` what is slow takes for `slow-step`, `slow-eval` (each pass),
    `slow-save`, and every pass of a `straggler`. `once`: in the first attempt alone.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: Any,
        *,
        fault: str = "none",
        step: int = 4,
        rank: int = 1,
        pass_s: float = 0.0,
        slow_s: float = 0.0,
        once: bool = False,
    ) -> None:
        super().__init__(job, tokenizer)
        self._fault, self._step, self._is_at_fault = fault, step, os.environ.get("RANK") == str(rank)
        if once and os.environ.get("TRAINWRIGHT_ATTEMPT") != "1":
            self._fault = "none"
        self._pass_s, self._slow_s = pass_s, slow_s
        self._passes = self._batches = 0
        if fault == "slow-save" and self._is_at_fault:
            self._slow_down_saves()

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Return the batch, from the worker process of a DataLoader that gets stuck for `stuck-worker`."""
        self._batches += 1
        if self._fault == "stuck-worker" and self._is_at_fault and self._batches > self._step:
            next(iter(DataLoader(Stuck(), num_workers=1)))
        return super().collate(samples)

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of causal-lm, unless this is the rank and the pass."""
        time.sleep(self._slow_s if self._fault == "straggler" and self._is_at_fault else self._pass_s)
        loss = super().loss_sum(model, batch)
        if not model.training:
            time.sleep(self._slow_s if self._fault == "slow-eval" else 0.0)
            return loss
        self._passes += 1
        device = loss.device
        if self._fault in ("mismatch", "uneven"):
            self._talk(device)
        elif self._passes == self._step and self._is_at_fault:
            self._hang()
        return loss

    def _hang(self) -> None:
        if self._fault == "sleep":
            time.sleep(FOREVER_S)
        elif self._fault == "gil":
            mutex = ctypes.create_string_buffer(64)  # all zeros is PTHREAD_MUTEX_INITIALIZER of glibc
            for _ in range(2):
                # The second never returns, and PyDLL keeps the interpreter's lock. (sleep() would end at any signal.)
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        elif self._fault == "slow-step":
            time.sleep(self._slow_s)

    def _slow_down_saves(self) -> None:
        """Have each rank's part of a checkpoint take `slow_s` longer, as on a busy file system."""
        from trainwright.train import saving

        seal_file = saving.seal_file

        def slowly(*arguments: Any, **named: Any) -> Any:
            time.sleep(self._slow_s)
            return seal_file(*arguments, **named)

        saving.seal_file = slowly  # type: ignore[assignment]

    def _talk(self, device: torch.device) -> None:
        """Speak with the other ranks, as a task does that normalises over them: three times a pass, then once."""
        at_fault = self._is_at_fault and self._passes == self._step
        if at_fault and self._fault == "mismatch":
            dist.broadcast(torch.ones(64, device=device), src=0)
        for _ in range(2 if at_fault and self._fault == "uneven" else 3):
            dist.all_reduce(torch.ones(64, device=device))
        dist.barrier()


class Stuck(Dataset[int]):
    """A data set whose rows never come."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(FOREVER_S)
        return index

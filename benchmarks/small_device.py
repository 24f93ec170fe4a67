"""A device with little memory, played on the CPU: `task: small_device:OnSmallDevice` is causal-lm on it.

Every storage that torch makes is counted while it lives, in forward, backward and optimizer alike, and what would go
over the limit raises torch's own message instead of being made. A worker's peaks are those of this device.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hungry_task import MESSAGES
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.job.schema import Job
from trainwright.train import peaks
from trainwright.train.tasks.causal_lm import CausalLM


class SmallDevice(TorchDispatchMode):
    """So many bytes, and whatever torch makes from here on lives in them."""

    def __init__(self, limit_bytes: int, message: str) -> None:
        super().__init__()
        self.capacity_bytes, self._message = limit_bytes, message
        self._used = self._peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count what an operator returns."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is made of plain tensors, which come by here too
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or not size:
            return
        self._alive.add(key)
        self._used += size
        weakref.finalize(storage, self._forget, key, size)
        self._peak = max(self._peak, self._used)
        if self._used > self.capacity_bytes:
            kind = torch.OutOfMemoryError if self._message.startswith("CUDA out of memory") else RuntimeError
            raise kind(self._message)

    def _forget(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._used -= size

    def restart(self) -> None:
        """Count the peak from here on."""
        self._peak = self._used

    def needed_bytes(self) -> int:
        """Return the peak."""
        return self._peak


class OnSmallDevice(CausalLM):
    """causal-lm on a device of `limit_mib`; with `ranks`, the others have no limit. `message` is one of MESSAGES.

    What the task cannot see being made, the model and its batch, is there before it.
    """

    def __init__(
        self, job: Job, tokenizer: Any, *, limit_mib: float, message: str = "torch", ranks: list[int] | None = None
    ) -> None:
        super().__init__(job, tokenizer)
        rank = os.environ.get("RANK")
        if rank is None:
            return  # it only prepares the data
        limited = ranks is None or int(rank) in ranks
        device = SmallDevice(round(limit_mib * 2**20) if limited else 2**50, MESSAGES[message])
        device.__enter__()
        peaks.PEAKS["cpu"] = lambda *_: device

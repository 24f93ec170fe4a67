"""Micro-batches on their way from the token cache to the device, one ahead of the step that uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainwright.train.data.dataset import TokenDataset
from trainwright.train.tasks.protocol import Task

Samples = npt.NDArray[np.int64]


class Feed:
    """Collates on one thread beside the step; reading tokens needs no worker processes and none are made."""

    def __init__(self, data: TokenDataset, task: Task, device: torch.device) -> None:
        self._data, self._task, self._device = data, task, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")

    def batches(self, parts: Iterable[Samples]) -> Iterator[tuple[Samples, dict[str, torch.Tensor]]]:
        """Yield each part with its tensors on the device; the next part is read meanwhile."""
        waiting: list[tuple[Samples, Any]] = []
        for part in parts:
            waiting.append((part, self._thread.submit(self._collate, part)))
            if len(waiting) > 1:
                yield self._arrived(*waiting.pop(0))
        for entry in waiting:
            yield self._arrived(*entry)

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _collate(self, part: Samples) -> dict[str, torch.Tensor]:
        batch = self._task.collate([self._data[int(index)] for index in part])
        if self._device.type == "cuda":
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch

    def _arrived(self, part: Samples, future: Any) -> tuple[Samples, dict[str, torch.Tensor]]:
        return part, {name: tensor.to(self._device, non_blocking=True) for name, tensor in future.result().items()}

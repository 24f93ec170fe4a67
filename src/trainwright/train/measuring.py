"""What a rank measures of itself while it trains: its memory and the pace of its steps, for later predictions."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import pynvml
import torch

WARM_UP_STEPS = 1
"""Left out of the pace: the first step loads kernels and makes room."""


class Measuring:
    """The figures of one rank from here on; a step is only noted, and nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps_s: list[float] = []
        self._tokens: list[int] = []
        self._training_bytes = 0
        self._evaluation_bytes: int | None = None
        self._restart_peak()

    def add(self, step_s: float, tokens: int) -> None:
        """Note one optimizer step; `tokens` are those of the whole global batch."""
        self._steps_s.append(step_s)
        self._tokens.append(tokens)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Keep the peak of what runs inside apart from that of the steps."""
        self._training_bytes = max(self._training_bytes, self._peak_bytes())
        self._restart_peak()
        yield
        self._evaluation_bytes = max(self._evaluation_bytes or 0, self._peak_bytes())
        self._restart_peak()

    def figures(self) -> dict[str, Any] | None:
        """Return the figures, None before two steps: the first has neither the pace nor the optimizer's states.

        `allocated_bytes` and `evaluation_allocated_bytes` are torch's peaks within the steps and within evaluations,
        `reserved_bytes` its peak over both, `device_bytes` what nvidia-smi shows of this process; all None off CUDA.
        `resident_bytes` is the peak in host memory. `steps`, `step_s_median` and `tokens_per_s` (of all ranks
        together) are those after the first step.
        """
        steps_s, tokens = self._steps_s[WARM_UP_STEPS:], self._tokens[WARM_UP_STEPS:]
        if not steps_s:
            return None
        on_cuda = self._device.type == "cuda"
        evaluated = on_cuda and self._evaluation_bytes is not None
        return {
            "allocated_bytes": max(self._training_bytes, self._peak_bytes()) if on_cuda else None,
            "evaluation_allocated_bytes": self._evaluation_bytes if evaluated else None,
            "reserved_bytes": torch.cuda.max_memory_reserved(self._device) if on_cuda else None,
            "device_bytes": device_bytes(self._device) if on_cuda else None,
            "resident_bytes": resident_bytes(),
            "steps": len(steps_s),
            "step_s_median": median(steps_s),
            "tokens_per_s": sum(tokens) / sum(steps_s),
        }

    def _peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device)) if self._device.type == "cuda" else 0

    def _restart_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


def resident_bytes() -> int:
    """Return the peak of this process in host memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def device_bytes(device: torch.device) -> int | None:
    """Return what nvidia-smi shows of this process on a GPU; None where NVML does not say.

    In a container NVML gives the host's process numbers: the only process on a GPU is then taken to be this one.
    """
    # By UUID, as NVML knows nothing of CUDA_VISIBLE_DEVICES; of a MIG instance it is that of no GPU.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        pynvml.nvmlInit()
        try:
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    own = [process for process in processes if process.pid == os.getpid()] or processes
    return own[0].usedGpuMemory if len(own) == 1 else None

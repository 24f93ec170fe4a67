"""The most memory that a rank has needed since a given moment, of what its device has for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from trainwright.train.measuring import resident_bytes


class RankPeak(Protocol):
    """What a rank needs of its device; `capacity_bytes` is what it may have."""

    capacity_bytes: int

    def restart(self) -> None:
        """Count from here on."""

    def needed_bytes(self) -> int:
        """Return the most that was needed since then."""


class GpuPeak:
    """The whole GPU as nvidia-smi shows it, other programs included: torch's reserved peak and what lies outside."""

    def __init__(self, device: torch.device, host_bytes: int) -> None:
        self._device = device
        self.capacity_bytes = torch.cuda.mem_get_info(device)[1]

    def restart(self) -> None:
        """Give what torch keeps unused back first, so that it does not count as needed."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def needed_bytes(self) -> int:
        """Return torch's highest reservation, and what the GPU holds besides."""
        free, total = torch.cuda.mem_get_info(self._device)
        outside = total - free - torch.cuda.memory_reserved(self._device)
        return int(max(0, outside) + torch.cuda.max_memory_reserved(self._device))


class HostPeak:
    """The process in host memory, of the rank's part of what is there (`host_bytes`).

    Linux starts the count again where it is asked to (proc(5), /proc/PID/clear_refs); elsewhere it only rises.
    """

    def __init__(self, device: torch.device, host_bytes: int) -> None:
        self.capacity_bytes = host_bytes

    def restart(self) -> None:
        """Ask the kernel to forget the peak so far."""
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def needed_bytes(self) -> int:
        """Return the highest resident size."""
        with suppress(OSError):
            found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
            if found is not None:
                return 1024 * int(found[1])
        return resident_bytes()


PEAKS: dict[str, Callable[[torch.device, int], RankPeak]] = {"cuda": GpuPeak, "cpu": HostPeak, "mps": HostPeak}
"""How it is counted, by kind of device."""

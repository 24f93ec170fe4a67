"""The host, sample after sample: memory, cores, traffic, file systems and the kernel's own kills."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil

from trainwright.hardware.host import kernel_kills, read_host
from trainwright.hardware.reading import NotAvailable
from trainwright.watch.samples import HostSample

SHARED_MEMORY = Path("/dev/shm")
SHORTEST_S = 0.1
"""The kernel counts a core's time in hundredths of a second."""


class HostReader:
    """Reads this machine again and again; rates are those since the reading before, and at first not available."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._counts: dict[str, tuple[float, int]] = {}
        # psutil measures the cores from one call to the next.
        psutil.cpu_percent(percpu=True)
        self._cores_since_s = time.monotonic()

    def read(self) -> HostSample:
        """Return a sample of the host."""
        limited, _ = read_host()
        swap = psutil.swap_memory()
        cores = self._cores()
        disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
        shm, run_disk = _space(SHARED_MEMORY), _space(self._run_dir)
        return HostSample(
            memory_total_bytes=_int(limited.memory_total_bytes),
            memory_available_bytes=_int(limited.memory_available_bytes),
            swap_total_bytes=swap.total,
            swap_used_bytes=swap.used,
            cpu_pct=round(sum(cores) / len(cores), 1) if cores else None,
            cores_pct=cores,
            disk_read_bytes_s=self._rate("disk_read", disk and disk.read_bytes),
            disk_written_bytes_s=self._rate("disk_written", disk and disk.write_bytes),
            network_received_bytes_s=self._rate("received", network and network.bytes_recv),
            network_sent_bytes_s=self._rate("sent", network and network.bytes_sent),
            shm_total_bytes=shm and shm[0],
            shm_free_bytes=shm and shm[1],
            run_disk_total_bytes=run_disk and run_disk[0],
            run_disk_free_bytes=run_disk and run_disk[1],
            oom_kill_total=kernel_kills(),
        )

    def _cores(self) -> tuple[float, ...] | None:
        """Return the load of each core since the last call, None where that is too short to say."""
        if time.monotonic() - self._cores_since_s < SHORTEST_S:
            return None
        self._cores_since_s = time.monotonic()
        return tuple(psutil.cpu_percent(percpu=True))

    def _rate(self, name: str, count: int | None) -> float | None:
        if count is None:
            return None
        now_s = time.monotonic()
        before_s, before = self._counts.get(name, (now_s, count))
        self._counts[name] = (now_s, count)
        return round((count - before) / (now_s - before_s), 1) if now_s > before_s and count >= before else None


def _int(value: Any) -> int | None:
    return None if isinstance(value, NotAvailable) else int(value)


def _space(folder: Path) -> tuple[int, int] | None:
    """Return the size of a file system and what this user may still write, in bytes."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

"""How busy the GPUs of one node were while a script ran, as NVML says."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from trainwright.hardware.utilization import utilization_pct

EVERY_S = 2.0


class GpuUse:
    """Samples the GPUs that this process may use, and keeps the highest utilization of each in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._next_s = path, 0.0
        self._names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        self._highest: dict[str, int | None] = dict.fromkeys(self._names)

    def sample(self) -> None:
        """Look at the GPUs, if it is time."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + EVERY_S
        before = dict(self._highest)
        for name, seen in utilization_pct(self._names).items():
            self._highest[name] = max(seen, self._highest[name] or 0)
        if self._highest != before or not self._path.exists():
            with suppress(OSError):
                self._path.write_text(json.dumps(self._highest))

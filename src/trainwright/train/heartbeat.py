"""A rank's sign of life: a small file that says once a second where it is and where its time went."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch

from trainwright.runs.folder import RunFolder
from trainwright.train.assignment import Assignment
from trainwright.train.sections import Sections

PERIOD_S = 1.0


class Heartbeat:
    """Writes `ranks/rank_N.json` from a thread while it is open, and once more at the end.

    The thread goes on while the rank waits for others, so a file that grows old means that the whole process stands
    still. It costs the step nothing but the noting of sections, and a disk that fails costs it only this file.
    """

    def __init__(self, folder: RunFolder, assignment: Assignment, device: torch.device, sections: Sections) -> None:
        self._path = folder.rank_json(assignment.rank)
        self._device, self._sections = device, sections
        self._fixed = {
            "schema_version": 1,
            "attempt": assignment.attempt,
            "rank": assignment.rank,
            "node": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(device),
            "gpu_uuid": f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None,
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(PERIOD_S)
        if error is None:
            self._sections.enter("end")
            self._sections.drain()
        self._write()

    def _beat(self) -> None:
        while True:
            self._write()
            if self._stop.wait(PERIOD_S):
                return

    def _write(self) -> None:
        sections = self._sections
        record = {
            **self._fixed,
            "time_s": time.time(),
            "step": sections.step,
            "steps_total": sections.steps_done,
            "total_steps": sections.total_steps,
            "section": sections.now,
            "section_since_s": sections.since_s,
            "sections_s_total": {name: round(seconds, 6) for name, seconds in sections.seconds.items()},
            **_memory(self._device),
        }
        draft = self._path.with_suffix(".tmp")
        with suppress(OSError):
            draft.write_text(json.dumps(record, separators=(",", ":")) + "\n")
            draft.replace(self._path)


def _memory(device: torch.device) -> dict[str, Any]:
    """Return what torch's allocator holds in bytes, and how often it had to give back and try again; None off CUDA."""
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return {
        "allocated_bytes": stats.get("allocated_bytes.all.current"),
        "reserved_bytes": stats.get("reserved_bytes.all.current"),
        "allocated_peak_bytes": stats.get("allocated_bytes.all.peak"),
        "allocator_retries_total": stats.get("num_alloc_retries"),
    }

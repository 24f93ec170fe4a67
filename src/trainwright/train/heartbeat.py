"""A rank's sign of life: a small file that says once a second where it is and where its time went."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from trainwright.runs.folder import RunFolder
from trainwright.train.assignment import Assignment
from trainwright.train.step_timer import Sections

PERIOD_S = 1.0


class Heartbeat:
    """Writes `ranks/rank_N.json` from a thread while it is open, and once more at the end.

    The thread goes on while the rank waits for others, so a file that grows old means that the whole process stands
    still. Where a save, an evaluation or the start begins or ends it is written at once: of such a process it still
    says truly whether it is in one. It costs the step nothing but the noting of sections, and a disk that fails costs
    it only this file.
    """

    def __init__(self, folder: RunFolder, assignment: Assignment, device: torch.device, sections: Sections) -> None:
        self._path = folder.rank_json(assignment.rank)
        self._dump_request = folder.dump_request(assignment.attempt)
        self._flight_record = folder.flight_record(assignment.attempt, assignment.rank)
        self._answered_ns: int | None = None
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
        self._ended = False
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._sections.moved.set()
        self._thread.join(PERIOD_S)
        if error is None:
            self._sections.enter("end")
            self._sections.drain()
        self._write()

    def _beat(self) -> None:
        while True:
            self._sections.moved.clear()
            if self._ended:
                return
            self._write()
            self._answer()
            self._sections.moved.wait(PERIOD_S)

    def _answer(self) -> None:
        """Write down this rank's collectives where the launcher or the doctor asks for them, each time that it does."""
        with suppress(OSError):
            asked_ns = self._dump_request.stat().st_mtime_ns
            if asked_ns != self._answered_ns:
                self._answered_ns = asked_ns
                record = {"rank": self._fixed["rank"], **_flight_record(self._device)}
                self._replace(self._flight_record, record)

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
            "sections_p99_s": {name: round(seconds, 6) for name, seconds in sections.usual_longest_s().items()},
            **_memory(self._device),
        }
        with suppress(OSError):
            self._replace(self._path, record)

    @staticmethod
    def _replace(path: Path, record: dict[str, Any]) -> None:
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(record, separators=(",", ":")) + "\n")
        draft.replace(path)


def _flight_record(device: torch.device) -> dict[str, Any]:
    """Return the last collectives that this process took part in: torch's flight recorder, of NCCL or of gloo.

    It holds the last TORCH_FR_BUFFER_SIZE of them; torch 2.13 records gloo's too.
    """
    import torch._C._distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace_json" if device.type == "cuda" else "_dump_fr_trace_json", None)
    return {"entries": []} if dump is None else dict(json.loads(dump()))


def _memory(device: torch.device) -> dict[str, Any]:
    """Return what torch's allocator holds in bytes, and how often it had to give back and try again; None off CUDA."""
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return {
        "allocated_bytes": stats.get("allocated_bytes.all.current"),
        "reserved_bytes": stats.get("reserved_bytes.all.current"),
        "allocated_peak_bytes": stats.get("allocated_bytes.all.peak"),
        "allocator_retries_total": stats.get("num_alloc_retries"),
    }

"""What comes and goes in the steps of requests, by the traced step and by the closed form; a script, as the trace is.

    python events.py REQUESTS.json BYTES

prints for each request `{"traced": [...], "closed": [...]}`: sizes in bytes of the pieces of BYTES and more, in the
order in which they are taken (positive) and freed (negative), up to the last that is taken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainwright.anatomy import anatomy, read_config
from trainwright.estimate.allocator import CachingAllocator
from trainwright.estimate.closed import replay, replayed
from trainwright.estimate.request import Request
from trainwright.estimate.trace.peaks_report import training_records
from trainwright.estimate.trace.run import trace

STEPS = ("forward", "backward", "optimizer")


class Listening(CachingAllocator):
    """Notes what it is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.sizes: dict[int, int] = {}
        heard.clear()

    def allocate(self, key: int, size_bytes: int, stream: int = 0) -> None:
        """Note a piece that is taken."""
        self.sizes[key] = size_bytes
        heard.append(size_bytes)
        super().allocate(key, size_bytes, stream)

    def free(self, key: int, *, held: bool = False) -> None:
        """Note a piece that is freed."""
        heard.append(-self.sizes.pop(key))
        super().free(key, held=held)


heard: list[int] = []
"""What the closed form's allocator was asked for last."""


def traced_events(request: Request) -> list[int]:
    """Return the sizes of what the traced steps take and free."""
    records = training_records(trace(request).tracker)
    return [record.size_bytes for record in records if record.phase.name in STEPS]


def closed_events(request: Request) -> list[int]:
    """Return the sizes of what the closed form lets come and go, the model at first."""
    replayed(anatomy(read_config(request.config, from_scratch=True)), request)
    return list(heard)


def large(events: Iterable[int], least_bytes: int) -> list[int]:
    """Return the large ones, up to the last that is taken."""
    found = [size for size in events if abs(size) >= least_bytes]
    while found and found[-1] < 0:
        found.pop()
    return found


def main() -> None:
    """Compare the requests of the file."""
    replay.CachingAllocator = Listening  # type: ignore[misc]
    least_bytes, found = int(sys.argv[2]), []
    for data in json.loads(Path(sys.argv[1]).read_text()):
        request = Request.parse(data)
        ways = {"traced": traced_events(request), "closed": closed_events(request)}
        found.append({way: large(events, least_bytes) for way, events in ways.items()})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

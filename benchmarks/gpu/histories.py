"""What the caching allocator was asked for and took, event by event, as data for tests of its simulator.

    python benchmarks/gpu/histories.py FOLDER NAME...

measures each configuration in a process of its own, so that nothing was taken before, and writes FOLDER/NUMBER.json.gz:

| field | is |
|---|---|
| `events` | a size in bytes for each allocation; for each free minus the number of its allocation, counted from 1 |
| `segments` | [number of events before it, bytes] taken from the device, negative where given back |
| `chosen` | the addresses of the segments, in that order, less the lowest |
| `streams` | the allocations that were not made on the default stream, by number, and theirs |
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from configurations import configurations
from constants import versions
from measure import environment

LISTED = 4_000_000
"""Events that torch keeps; five steps of a large model have a few hundred thousand."""


def main() -> int:
    """Start a process for each configuration, or be one."""
    folder, *names = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    if os.environ.get("RANK") is not None:
        record(names[0], Path(folder))
        return 0
    failed = 0
    for name in names:
        one = environment() | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        failed += subprocess.run([sys.executable, __file__, folder, name], env=one, check=False).returncode != 0
    return failed


def record(name: str, folder: Path) -> None:
    """Measure one configuration and write its history."""
    import steps

    from trainwright.train.ranks import Ranks

    number, configuration = next((n, c) for n, c in enumerate(configurations("cuda")) if c.name == name)
    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as weights:
        rank = steps.Rank(configuration, Ranks(0, 1, device), Path(weights))
        torch.cuda.set_device(device)
        torch.cuda.memory._record_memory_history(context=None, max_entries=LISTED)
        figures = rank.measure()
        traces = torch.cuda.memory._snapshot()["device_traces"][0]
    written = compact(traces) | {
        "schema_version": 1,
        "name": name,
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "request": configuration.request(compute_capability=list(torch.cuda.get_device_capability())),
        "allocated_bytes": figures["allocated_bytes"],
        "reserved_bytes": figures["reserved_bytes"],
    }
    with gzip.open(folder / f"{number}.json.gz", "wt") as file:
        json.dump(written, file)
    print(f"{name}: {len(written['events'])} events, {figures['reserved_bytes'] / 2**30:.3f} GiB reserved")


def compact(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the events of a snapshot without addresses of tensors, and what was taken for them."""
    events: list[int] = []
    segments: list[tuple[int, int]] = []
    addresses: list[int] = []
    numbers: dict[int, int] = {}
    streams: dict[int, int] = {}
    allocations = 0
    for event in traces:
        kind, address, size = event["action"], event["addr"], event["size"]
        if kind == "alloc":
            allocations += 1
            numbers[address] = allocations
            events.append(size)
            if event["stream"]:
                streams[allocations] = event["stream"]
        elif kind == "free_completed":
            events.append(-numbers.pop(address))
        elif kind in ("segment_alloc", "segment_free"):
            segments.append((len(events), size if kind == "segment_alloc" else -size))
            addresses.append(address)
    lowest = min(addresses, default=0)
    chosen = [address - lowest for address in addresses]
    return {"events": events, "segments": segments, "chosen": chosen, "streams": streams}


if __name__ == "__main__":
    sys.exit(main())

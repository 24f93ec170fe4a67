"""What torch's caching allocator was asked for and took on an H200, against its simulator and against traced steps.

Recorded by benchmarks/gpu/histories.py with torch 2.11, transformers 5.17 and CUDA 13.0 (S1.D, S4.K).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tracing import trace

from trainwright.estimate.allocator import CachingAllocator

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.json.gz"))


def recorded(path: Path) -> dict[str, Any]:
    with gzip.open(path) as file:
        found: dict[str, Any] = json.load(file)
    return found


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.name.partition(".")[0])
def test_the_simulator_takes_each_segment_that_the_gpu_took(path: Path) -> None:
    history = recorded(path)
    allocator, taken, number = CachingAllocator(), [], 0
    for position, event in enumerate(history["events"]):
        before = allocator.reserved_bytes
        if event > 0:
            number += 1
            allocator.allocate(number, event)
        else:
            allocator.free(-event)
        if allocator.reserved_bytes != before:
            taken.append([position, allocator.reserved_bytes - before])
    assert taken == history["segments"]
    assert allocator.peak_reserved_bytes == history["reserved_bytes"]


def test_traced_steps_reserve_what_real_ones_did(tmp_path: Path) -> None:
    histories = [recorded(path) for path in HISTORIES]
    done = trace([history["request"] for history in histories], tmp_path)
    for history, answer in zip(histories, json.loads(done.stdout), strict=True):
        for figure in ("allocated_bytes", "reserved_bytes"):
            assert answer["peak"][figure] == pytest.approx(history[figure], rel=0.001), (history["name"], figure)

"""How much memory a rank may have on its GPU, and where that figure comes from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.estimate.cuda_overhead import context_bytes
from trainwright.hardware import catalog
from trainwright.hardware.inventory import Device
from trainwright.hardware.reading import GIB, NotAvailable

DRIVER_SHARE = 0.97
"""What CUDA gives of a total that is only nominal: 0.97 (T4) to 0.99 (A100) of the cards whose figure is known."""
MARGIN = 0.05
"""Share of a GPU that stays free in a plan: an estimate may be too low by as much, and a fragmented allocator needs
room to move."""
APPLE_SHARE = 2 / 3
"""Of its memory that an Apple machine's GPU may have (Metal's recommendedMaxWorkingSetSize): 10.67 of 16 GB, the least
share that is published (github.com/exo-explore/exo/pull/1672); larger machines give up to 0.84."""

USUAL_HOST_TIMES = 2
"""Host memory of a node over that of its GPUs: 1.5 times at least, better twice (NVIDIA-Certified Systems Configuration
Guide, system memory); a DGX H100 has 3.2 times."""


@dataclass(frozen=True)
class Capacity:
    """Bytes that all of one process may take on a GPU, context included, and the reason."""

    total_bytes: int
    reason: str


def capacity_of(device: Device) -> Capacity | None:
    """Return what a process can have of this GPU now; None where nothing is known of its memory.

    What is free is read on a live GPU; one that is only written down is taken to be empty.
    """
    gpu = None if device.catalog_key is None else catalog.catalog().gpus[device.catalog_key]
    total = None if isinstance(device.memory_total_bytes, NotAvailable) else device.memory_total_bytes
    if gpu is not None and gpu.cuda_total_gib is not None and device.mig is None:
        found = Capacity(int(gpu.cuda_total_gib.value * GIB), "what CUDA gives to programs")
    elif total is not None:
        found = Capacity(int(total * DRIVER_SHARE), f"{DRIVER_SHARE:.0%} of the memory, as the driver keeps some")
    else:
        return None
    free = device.memory_free_bytes
    if isinstance(free, NotAvailable) or free >= found.total_bytes:
        return found
    return Capacity(free, "what is free now")


def room_of(device: Device) -> int | None:
    """Return the bytes that tensors may take on a device in a plan, None where nothing is known of its memory."""
    capacity = capacity_of(device)
    if capacity is None:
        return None
    if device.kind == "mps":
        return int(capacity.total_bytes * APPLE_SHARE)
    room = int(capacity.total_bytes * (1 - MARGIN))
    if device.kind == "cpu":
        return room
    return room - context_bytes(None if device.catalog_key is None else catalog.catalog().gpus[device.catalog_key])


def usual_host_bytes(devices: Sequence[Device]) -> int | None:
    """Return the host memory that a node with these GPUs usually has, None where their memory is not known.

    Of several nodes it is that of the one with the largest GPUs.
    """
    by_node: dict[int, int] = defaultdict(int)
    for device in devices:
        if device.kind != "cuda" or isinstance(device.memory_total_bytes, NotAvailable):
            return None
        by_node[device.node] += device.memory_total_bytes
    return USUAL_HOST_TIMES * max(by_node.values())

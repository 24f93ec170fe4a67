"""How much memory a rank may have on its GPU, and where that figure comes from."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.hardware import catalog
from trainwright.hardware.inventory import Device
from trainwright.hardware.reading import GIB, NotAvailable

DRIVER_SHARE = 0.97
"""What CUDA gives of a total that is only nominal: 0.97 (T4) to 0.99 (A100) of the cards whose figure is known."""


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

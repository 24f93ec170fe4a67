"""What `gpus` and a job's log print about devices, as pure functions from an Inventory to lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from trainwright.hardware.inventory import Device, Inventory, NvLink
from trainwright.hardware.precision import choose_precision
from trainwright.hardware.reading import GIB, MIB, NOT_AVAILABLE, NotAvailable, Reading

# The texts of S0-25 to S0-29 are fixed to the character; scripts read them.
GPU_INFO_HEADER: Final = "index, name, memory.total, memory.free"
MIXED_WARNING: Final = "⚠️  WARNING: Mixed GPU types detected!"
ZERO2_LINE: Final = "✅ Using ZeRO-2 (faster, sufficient for A100-40GB+)"
V100_ZERO3_LINE: Final = "⚠️  V100 detected - Using ZeRO-3 for memory optimization"
SMALL_ZERO3_LINE: Final = "⚠️  32GB GPU detected - Using ZeRO-3 for memory optimization"
MIXED_RISKS: Final = (
    "Training speed limited by slowest GPU",
    "Potential communication problems",
    "Memory imbalance between GPUs",
)
_RULE: Final = "=" * 40

_DEVICE_COLUMNS: Final = (
    "INDEX",
    "CUDA",
    "NAME",
    "MEMORY",
    "FREE",
    "CAPABILITY",
    "PRECISION",
    "PCIE",
    "NVLINK",
    "NUMA",
    "USED BY",
)


def gpu_info_block(devices: Sequence[Device]) -> list[str]:
    """The `GPU Info` block of a job's log, one CSV row a GPU (S0-25, S0-26)."""
    rows = [
        f"{device.index}, {device.name}, {_mib(device.memory_total_bytes)}, {_mib(device.memory_free_bytes)}"
        for device in devices
    ]
    return [_RULE, "GPU Info", _RULE, GPU_INFO_HEADER, *rows]


def mixed_gpus_block(devices: Sequence[Device]) -> list[str]:
    """The warning and the boxed table for GPUs of more than one model or size, else nothing (S0-28, S0-29)."""
    if len({(device.name, _gib(device.memory_total_bytes)) for device in devices}) < 2:
        return []
    rows = [("index", "name", "memory.total")]
    rows += [(str(device.index), device.name, _mib(device.memory_total_bytes)) for device in devices]
    return [MIXED_WARNING, *_boxed(rows)]


def mixed_gpus_advice(types: Sequence[str | None]) -> list[str]:
    """What a job with GPUs of these Slurm types is told where they differ, else nothing (S0-36).

    The guide's script then waits 10 s for a Ctrl+C, which nobody presses in a batch job.
    """
    counts = Counter(types)
    if len(counts) < 2:
        return []
    kind, number = counts.most_common(1)[0]
    example = [f"  Example: #SBATCH --gres=gpu:{kind}:{number}"] if kind is not None else []
    risks = [f"  - {risk}" for risk in MIXED_RISKS]
    return [*risks, "  Recommended: Request homogeneous GPUs", *example]


def strategy_line(strategy: str, devices: Sequence[Device], *, fits_40gb: bool) -> str | None:
    """The line for a ZeRO stage (S0-27, S0-36): why stage 3, or that stage 2 is enough; None for other strategies.

    `fits_40gb` says that a rank needs no more than an A100-40GB has. A GPU is "32GB" when its memory rounds to 32 GiB,
    as drivers keep a little back.
    """
    if strategy == "zero2":
        large = all(isinstance(size := d.memory_total_bytes, int) and round(size / GIB) >= 40 for d in devices)
        return ZERO2_LINE if fits_40gb and large else "Using ZeRO-2"
    if strategy != "zero3":
        return None
    if any("V100" in device.name for device in devices):
        return V100_ZERO3_LINE
    if any(isinstance(size := d.memory_total_bytes, int) and round(size / GIB) == 32 for d in devices):
        return SMALL_ZERO3_LINE
    return "Using ZeRO-3"


def device_table(inventory: Inventory) -> list[str]:
    """Every device in aligned columns, nothing cut short; `-` where there is nothing to read."""
    rows = [_DEVICE_COLUMNS, *(_device_row(device) for device in inventory.devices)]
    if inventory.nodes > 1:
        nodes = ["NODE", *(str(device.node) for device in inventory.devices)]
        rows = [(node, *row) for node, row in zip(nodes, rows, strict=True)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def host_lines(inventory: Inventory) -> list[str]:
    """Host memory, cores and NUMA nodes, and the NVIDIA driver where there is one."""
    host = inventory.host
    each = f" (each of {inventory.nodes} nodes)" if inventory.nodes > 1 else ""
    lines = [
        f"host{each}: memory {_gib(host.memory_total_bytes)}, free {_gib(host.memory_available_bytes)}; "
        f"cores {host.cores}; NUMA nodes {host.numa_nodes}"
    ]
    if inventory.driver_version is not None:
        cuda = inventory.cuda_version
        version = f"{cuda[0]}.{cuda[1]}" if isinstance(cuda, tuple) else str(NOT_AVAILABLE)
        lines.append(f"NVIDIA driver {inventory.driver_version}; CUDA up to {version}")
    return lines


def _device_row(device: Device) -> tuple[str, ...]:
    is_gpu = device.kind == "cuda"
    return (
        "-" if device.index is None else f"{device.index}{'' if device.mig is None else f' {_mig_place(device)}'}",
        "hidden" if not device.allowed else "-" if device.cuda_ordinal is None else str(device.cuda_ordinal),
        device.name,
        _gib(device.memory_total_bytes),
        _gib(device.memory_free_bytes),
        _capability(device.compute_capability) if is_gpu else "-",
        choose_precision(device).value,
        _pcie(device) if is_gpu else "-",
        _nvlink(device.nvlink) if is_gpu else "-",
        str(device.numa_node) if is_gpu else "-",
        _users(device) if is_gpu else "-",
    )


def _mig_place(device: Device) -> str:
    assert device.mig is not None
    return f"MIG {device.mig.gpu_instance}/{device.mig.compute_instance}"


def _capability(value: Reading[tuple[int, int]]) -> str:
    return str(value) if isinstance(value, NotAvailable) else f"{value[0]}.{value[1]}"


def _pcie(device: Device) -> str:
    if isinstance(device.pcie_generation, NotAvailable) and isinstance(device.pcie_width, NotAvailable):
        return str(NOT_AVAILABLE)
    return f"gen {device.pcie_generation} x{device.pcie_width}"


def _nvlink(value: Reading[NvLink | None]) -> str:
    if value is None:
        return "none"
    if isinstance(value, NotAvailable):
        return str(value)
    peers = ",".join(map(str, value.peers))
    return f"gen {value.generation}, {value.links} links" + (f" to {peers}" if peers else "")


def _users(device: Device) -> str:
    if isinstance(device.processes, NotAvailable):
        return str(NOT_AVAILABLE)
    if not device.processes:
        return "nobody"
    return "; ".join(
        f"pid {process.pid}"
        + (f" {process.command} of {process.user}" if isinstance(process.command, str) else "")
        + f": {_gib(process.memory_bytes)}"
        for process in device.processes
    )


def _gib(size_bytes: Reading[int]) -> str:
    return str(size_bytes) if isinstance(size_bytes, NotAvailable) else f"{size_bytes / GIB:.1f} GiB"


def _mib(size_bytes: Reading[int]) -> str:
    return str(size_bytes) if isinstance(size_bytes, NotAvailable) else f"{size_bytes // MIB} MiB"


def _boxed(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = ["│" + "│".join(f" {cell:{width}} " for cell, width in zip(row, widths, strict=True)) + "│" for row in rows]
    top, middle, bottom = (
        left + cross.join("─" * (width + 2) for width in widths) + right
        for left, cross, right in (("┌", "┬", "┐"), ("├", "┼", "┤"), ("└", "┴", "┘"))
    )
    return [top, cells[0], middle, *cells[1:], bottom]

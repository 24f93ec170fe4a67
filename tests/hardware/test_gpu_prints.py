"""The texts of a job's log, to the character."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright.hardware.device_text import device_table, gpu_info_block, host_lines, mixed_gpus_block, strategy_line
from trainwright.hardware.inventory import Device, DeviceProcess, Inventory, parse_inventory
from trainwright.hardware.reading import GIB, MIB, NOT_AVAILABLE

A100 = Device(
    kind="cuda",
    name="NVIDIA A100-SXM4-80GB",
    index=0,
    cuda_ordinal=0,
    memory_total_bytes=81920 * MIB,
    memory_free_bytes=80000 * MIB,
    compute_capability=(8, 0),
)
V100 = replace(
    A100,
    name="Tesla V100-SXM2-32GB",
    index=2,
    cuda_ordinal=None,
    allowed=False,
    memory_total_bytes=32768 * MIB,
    memory_free_bytes=NOT_AVAILABLE,
    compute_capability=(7, 0),
)


def test_gpu_info_block() -> None:
    """S0-25, S0-26."""
    assert gpu_info_block([A100, V100]) == [
        "========================================",
        "GPU Info",
        "========================================",
        "index, name, memory.total, memory.free",
        "0, NVIDIA A100-SXM4-80GB, 81920 MiB, 80000 MiB",
        "2, Tesla V100-SXM2-32GB, 32768 MiB, not available",
    ]


def test_mixed_gpus_block() -> None:
    """S0-28, S0-29."""
    assert mixed_gpus_block([A100, V100]) == [
        "⚠️  WARNING: Mixed GPU types detected!",
        "┌───────┬───────────────────────┬──────────────┐",
        "│ index │ name                  │ memory.total │",
        "├───────┼───────────────────────┼──────────────┤",
        "│ 0     │ NVIDIA A100-SXM4-80GB │ 81920 MiB    │",
        "│ 2     │ Tesla V100-SXM2-32GB  │ 32768 MiB    │",
        "└───────┴───────────────────────┴──────────────┘",
    ]


def test_like_gpus_give_no_warning_and_unlike_sizes_do() -> None:
    assert mixed_gpus_block([A100, replace(A100, index=1)]) == []
    small, large = (replace(A100, name="NVIDIA GeForce RTX 3080", memory_total_bytes=gib * GIB) for gib in (10, 20))
    assert mixed_gpus_block([small, large])


@pytest.mark.parametrize(
    ("strategy", "devices", "line"),
    [
        ("zero2", [A100], "✅ Using ZeRO-2 (faster, sufficient for A100-40GB+)"),
        ("zero3", [A100, V100], "⚠️  V100 detected - Using ZeRO-3 for memory optimization"),
        (
            "zero3",
            [replace(A100, name="NVIDIA GeForce RTX 5090", memory_total_bytes=32607 * MIB)],
            "⚠️  32GB GPU detected - Using ZeRO-3 for memory optimization",
        ),
        ("ddp", [A100], None),
    ],
)
def test_strategy_line(strategy: str, devices: list[Device], line: str | None) -> None:
    """S0-27, S0-36."""
    assert strategy_line(strategy, devices, fits_40gb=True) == line


@pytest.mark.parametrize(
    ("devices", "fits_40gb"),
    [([V100], True), ([A100, replace(A100, memory_total_bytes=32 * GIB)], True), ([A100], False)],
)
def test_harm_14_zero_2_is_called_sufficient_for_40_gb_only_where_it_is(devices: list[Device], fits_40gb: bool) -> None:
    assert strategy_line("zero2", devices, fits_40gb=fits_40gb) == "Using ZeRO-2"


def test_the_table_cuts_nothing_and_aligns_its_columns() -> None:
    """Off a terminal a row is as long as it has to be."""
    name = "NVIDIA " + "X" * 200
    process = DeviceProcess(pid=7, user="ada", command="python", memory_bytes=3 * GIB)
    device = replace(A100, name=name, processes=(process,), nvlink=None)
    header, first, second = device_table(Inventory(devices=(device, V100), host=parse_inventory("t4").host))
    assert name in first
    assert first.endswith("pid 7 python of ada: 3.0 GiB")
    start = header.index("MEMORY")
    assert (first[start:].split()[0], second[start:].split()[0]) == ("80.0", "32.0")
    assert "hidden" in second and "not available" in second


def test_the_host_line_says_what_is_not_known() -> None:
    known, unknown = (host_lines(parse_inventory(text))[0] for text in ("t4,host=16gib", "t4"))
    assert known.startswith("host: memory 16.0 GiB, free not available")
    assert unknown == "host: memory not available, free not available; cores not available; NUMA nodes not available"

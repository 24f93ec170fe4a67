"""The host: memory and cores that this process may use, the processor, and Apple's GPU."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from trainwright.hardware import catalog
from trainwright.hardware.inventory import Device, Host
from trainwright.hardware.reading import GIB, NOT_AVAILABLE, Reading

_BF16_FLAGS: Final = ("amx_bf16", "avx512_bf16", "bf16")
"""Names in /proc/cpuinfo of native bf16 arithmetic: x86's two, and `bf16` of Arm's `Features` line."""


def read_host(root: Path = Path("/")) -> tuple[Host, tuple[str, ...]]:
    """This node's host and notes on what limits it; `root` is the file system that /proc and /sys are under."""
    memory = psutil.virtual_memory()
    physical_cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical_cores
    host = Host(
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        cores=allowed,
        numa_nodes=_numa_nodes(root),
    )
    return _within_cgroups(host, root)


def _numa_nodes(root: Path) -> Reading[int]:
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or NOT_AVAILABLE


def _within_cgroups(host: Host, root: Path) -> tuple[Host, tuple[str, ...]]:
    """Lower the figures to the control groups' limits: a batch job or container has less than the machine."""
    total, available, cores = host.memory_total_bytes, host.memory_available_bytes, host.cores
    assert isinstance(total, int) and isinstance(available, int) and isinstance(cores, int)
    for folder in _cgroup_folders(root):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        if limit is not None and limit < total:
            used = _number(folder / "memory.current", folder / "memory.usage_in_bytes") or 0
            total, available = limit, min(available, max(limit - used + _file_cache_bytes(folder), 0))
        cores = min(cores, _cpu_quota(folder) or cores)
    notes = []
    if total != host.memory_total_bytes:
        notes.append(f"a container or batch system limits host memory to {total / GIB:.1f} GiB")
    if cores != host.cores:
        notes.append(f"a container or batch system limits processor time to {cores} of {host.cores} cores")
    limited = replace(host, memory_total_bytes=total, memory_available_bytes=available, cores=cores)
    return limited, tuple(notes)


def _cgroup_folders(root: Path) -> list[Path]:
    """The control groups that this process is in, outermost first (proc(5), /proc/PID/cgroup); v2 and v1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for base in [mount] if not controllers else [mount / name for name in controllers.split(",") if name]:
            parts = [part for part in path.split("/") if part not in ("", "..")]
            steps = [base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
            folders += [step for step in steps if step.is_dir() and step not in folders]
    return folders


def kernel_kills(root: Path = Path("/")) -> int:
    """Processes killed so far for want of memory: in this process's control group, else on the whole machine.

    Only a rise of it tells such a SIGKILL from one that somebody sent. A group's own count holds kills by any of the
    kernel's memory limits (Linux, Documentation/admin-guide/cgroup-v2.rst, `oom_kill`; v1: `memory.oom_control`).
    """
    groups = [folder / name for folder in _cgroup_folders(root) for name in ("memory.events", "memory.oom_control")]
    for path in [*reversed(groups), root / "proc/vmstat"]:
        try:
            counts = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
        except OSError:
            continue
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return 0


def _number(*candidates: Path) -> int | None:
    for path in candidates:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _file_cache_bytes(folder: Path) -> int:
    """Page cache that counts as used and that the kernel gives back under pressure."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _cpu_quota(folder: Path) -> int | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except OSError:
        return None
    return None if quota == "max" else max(1, math.floor(int(quota) / int(period)))


def processor(host: Host, root: Path = Path("/")) -> Device:
    """The CPU as a device; its memory is the host's."""
    flags: set[str] = set()
    name = platform.processor() or platform.machine()
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for key, _, value in (line.partition(":") for line in lines):
        if key.strip() in ("flags", "Features"):
            flags.update(value.split())
        elif key.strip() == "model name":
            name = value.strip()
    return Device(
        kind="cpu",
        name=name,
        memory_total_bytes=host.memory_total_bytes,
        memory_free_bytes=host.memory_available_bytes,
        nvlink=None,
        bf16_instructions=tuple(flag for flag in _BF16_FLAGS if flag in flags),
    )


def apple_gpu(host: Host) -> Device | None:
    """The GPU of an Apple-silicon Mac, which shares the host's memory; None elsewhere."""
    if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return None
    try:
        name = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        name = "Apple GPU"
    return Device(
        kind="mps",
        name=name,
        memory_total_bytes=host.memory_total_bytes,
        memory_free_bytes=host.memory_available_bytes,
        nvlink=None,
        catalog_key=catalog.identify(name, host.memory_total_bytes),
    )

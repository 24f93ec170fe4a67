"""Checks of this machine and environment (S1-35, S3-32, S4-43)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

from trainwright.doctor.before.check_result import Checked, ok, problem, warning
from trainwright.hardware.device_text import mixed_gpus_block
from trainwright.hardware.inventory import Device, Inventory
from trainwright.hardware.precision import choose_precision
from trainwright.hardware.reading import GIB, NotAvailable

LEAST_SHM_GIB: Final = 1.0
"""Docker's default is 64 MB; four workers with a few batches of images each need several hundred."""
LEAST_OPEN_FILES: Final = 4096
LEAST_HOST_GIB: Final = 2.0
IDLE_BYTES: Final = GIB // 2
"""A process below it is a desktop or a monitor."""
USUAL_PORT: Final = 29500
NEEDED: Final = ("torch", "transformers", "peft", "accelerate", "safetensors")


def driver(inventory: Inventory) -> Iterator[Checked]:
    """The NVIDIA driver answers and loses no GPU (nvidia-smi works)."""
    for note in inventory.notes:
        lost = "is lost" in note or "driver was updated" in note or "not loaded" in note
        if lost:
            yield problem("driver", note, "see what the kernel says: dmesg -T | grep -i -E 'nvrm|xid'")
        elif "CUDA_VISIBLE_DEVICES" in note:
            yield warning("gpus", note, "unset CUDA_VISIBLE_DEVICES, or name GPUs that are there (nvidia-smi -L)")
    if isinstance(inventory.driver_version, str):
        cuda = inventory.cuda_version
        newest = "" if cuda is None or isinstance(cuda, NotAvailable) else f", runs CUDA up to {cuda[0]}.{cuda[1]}"
        yield ok("driver", f"NVIDIA {inventory.driver_version}{newest}")


def gpus(inventory: Inventory) -> Iterator[Checked]:
    """GPUs are visible, idle, and alike; what precision they train in."""
    cuda = [device for device in inventory.devices if device.kind == "cuda"]
    usable = inventory.usable
    if not cuda:
        kind = usable[0]
        yield ok("gpus", f"no NVIDIA GPU here; {kind.name or kind.kind} trains in {choose_precision(kind).value}")
        return
    yield ok("gpus", f"{len([d for d in cuda if d.usable])} of {len(cuda)} can be used")
    for device in cuda:
        yield _precision(device)
        yield from _idle(device)
    if mixed := mixed_gpus_block([device for device in cuda if device.allowed]):
        yield warning("gpus", mixed[0], "trainwright plan JOB finds the layout for unlike GPUs")


def _precision(device: Device) -> Checked:
    choice = choose_precision(device)
    return ok("precision", f"GPU {device.label}: {choice.value} ({choice.reason})")


def _idle(device: Device) -> Iterator[Checked]:
    if isinstance(device.processes, NotAvailable):
        return
    for process in device.processes:
        held = process.memory_bytes
        if not isinstance(held, NotAvailable) and held >= IDLE_BYTES:
            who = f"process {process.pid} ({process.command}, {process.user})"
            text = f"GPU {device.label}: {who} holds {held / GIB:.1f} GiB"
            yield warning("gpus", text, f"end it if it is yours: kill {process.pid}; or choose other GPUs: --gpus LIST")


def torch_build(inventory: Inventory, torch: Mapping[str, Any]) -> Iterator[Checked]:
    """torch is there, built for a CUDA that the driver runs, and sees the GPUs that there are."""
    if "error" in torch:
        yield problem(
            "torch",
            f"torch cannot be used: {torch['error']}",
            "activate its environment, or: pip install 'trainwright[train]'",
        )
        return
    usable_gpus = [device for device in inventory.usable if device.kind == "cuda"]
    index = "pip install torch --index-url https://download.pytorch.org/whl/cu"
    if not usable_gpus:
        yield ok("torch", f"{torch['version']}, CUDA {torch['cuda'] or 'not built in'}")
        return
    if torch["cuda"] is None:
        yield problem("torch", f"torch {torch['version']} is built without CUDA, and there are GPUs", f"{index}126")
        return
    newest = inventory.cuda_version
    if isinstance(newest, tuple) and _numbers(torch["cuda"])[0] > newest[0]:
        text = f"torch is built for CUDA {torch['cuda']}, the driver runs {newest[0]}.{newest[1]} at most"
        yield problem("torch", text, "update the driver", f"or a torch for it: {index}{newest[0]}{newest[1]}")
    if not torch["available"]:
        why = "; ".join(torch.get("warnings", ())) or "torch.cuda.is_available() is false"
        yield problem("torch", f"torch sees no GPU: {why}", "nvidia-smi; echo $CUDA_VISIBLE_DEVICES")
        return
    if len(torch["devices"]) != len(usable_gpus):
        text = f"torch sees {len(torch['devices'])} GPUs, the driver {len(usable_gpus)}"
        yield problem("torch", text, "compare nvidia-smi -L with CUDA_VISIBLE_DEVICES")
    else:
        yield ok("torch", f"{torch['version']}, CUDA {torch['cuda']}, sees {len(usable_gpus)} GPUs")
    yield from _architectures(torch, index)
    yield from _links(torch)


def _architectures(torch: Mapping[str, Any], index: str) -> Iterator[Checked]:
    built = {int(name.removeprefix("sm_").rstrip("af")) for name in torch["architectures"] if name.startswith("sm_")}
    for number, device in enumerate(torch["devices"]):
        major, minor = device["capability"]
        # Code of one minor version runs on later ones of the same major (CUDA's binary compatibility).
        if built and not any(arch // 10 == major and arch % 10 <= minor for arch in built):
            text = f"torch has no code for GPU {number} ({device['name']}, sm_{major}{minor})"
            yield problem("torch", text, f"a newer torch: {index}128")


def _links(torch: Mapping[str, Any]) -> Iterator[Checked]:
    count = len(torch["devices"])
    if count < 2:
        return
    if torch["nccl"] is None:
        yield problem("nccl", "torch is built without NCCL, which joins GPUs", "install a Linux CUDA build of torch")
        return
    yield ok("nccl", f"NCCL {torch['nccl']}")
    apart = [f"{number}" for number, device in enumerate(torch["devices"]) if len(device["peers"]) < count - 1]
    if apart:
        text = f"GPUs {', '.join(apart)} cannot reach all others directly (P2P); exchange goes through host memory"
        yield warning("nccl", text, "see the links: nvidia-smi topo -m; if NCCL hangs at the start: NCCL_P2P_DISABLE=1")
    else:
        yield ok("nccl", "every GPU reaches every other directly (P2P)")


def environment(torch: Mapping[str, Any]) -> Iterator[Checked]:
    """A virtual environment is active, and accelerate can be imported."""
    active = sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ
    yield (ok if active else warning)("environment", f"{sys.prefix} (Python {sys.version.split()[0]})")
    if "accelerate_error" in torch:
        yield problem(
            "environment", f"accelerate cannot be imported: {torch['accelerate_error']}", "pip install accelerate"
        )


def packages() -> Iterator[Checked]:
    """What training needs is installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        text = f"not installed in {sys.prefix}: {', '.join(missing)}"
        yield problem("packages", text, "activate the environment that has them, or: pip install 'trainwright[train]'")
    else:
        installed = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in NEEDED)
        yield ok("packages", installed)


def versions() -> Iterator[Checked]:
    """No installed version has a hole that is known (holes.yaml); of several, the worst is told."""
    named: set[str] = set()
    for hole in sorted(_holes(), key=lambda hole: hole["status"]):
        name = hole["package"]
        installed = _installed(name)
        if installed is None or name in named or not _is_bad(installed, hole):
            continue
        named.add(name)
        fix = f"pip install --upgrade '{name}>={hole['below']}'" if "below" in hole else f"pip uninstall {name}"
        yield Checked("versions", hole["status"], f"{name} {installed}: {hole['why']}", (fix,))


def _is_bad(installed: str, hole: Mapping[str, Any]) -> bool:
    if "below" in hole:
        return _numbers(installed) < _numbers(hole["below"])
    return installed in hole["exactly"]


@cache
def _holes() -> tuple[dict[str, Any], ...]:
    text = (files("trainwright.doctor.before") / "holes.yaml").read_text(encoding="utf-8")
    return tuple(YAML(typ="safe").load(text))


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Checked]:
    """/dev/shm has room for what data-loading workers hand over."""
    if not path.is_dir():
        return
    usage = shutil.disk_usage(path)
    text = f"{path}: {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < LEAST_SHM_GIB * GIB:
        yield warning(
            "shm",
            text,
            "docker run --shm-size=16g (or --ipc=host); mount -o remount,size=16g /dev/shm",
            "or num_workers=0 in your own script",
        )
    else:
        yield ok("shm", text)


def limits() -> Iterator[Checked]:
    """The limits on open files and processes are no trap."""
    files_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files_limit != resource.RLIM_INFINITY and files_limit < LEAST_OPEN_FILES:
        text = f"at most {files_limit} open files a process"
        yield warning("limits", text, f"ulimit -n {16 * LEAST_OPEN_FILES}")
    size_limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size_limit != resource.RLIM_INFINITY:
        yield warning("limits", f"files may have {size_limit / GIB:.1f} GiB at most", "ulimit -f unlimited")
    if files_limit == resource.RLIM_INFINITY or files_limit >= LEAST_OPEN_FILES:
        yield ok("limits", f"{files_limit} open files")


def host_memory(inventory: Inventory) -> Iterator[Checked]:
    """Host memory is left (S2-19)."""
    available = inventory.host.memory_available_bytes
    if isinstance(available, NotAvailable):
        return
    text = f"{available / GIB:.1f} GiB of host memory available"
    low = available < LEAST_HOST_GIB * GIB
    yield (
        warning("host", text, "end other programs (free -h; top -o %MEM), or ask for more memory")
        if low
        else ok("host", text)
    )


def port() -> Iterator[Checked]:
    """The usual port of a process group is free."""
    with socket.socket() as probe:
        is_in_use = probe.connect_ex(("127.0.0.1", USUAL_PORT)) == 0
    if is_in_use:
        text = f"port {USUAL_PORT}, which torchrun takes by default, is in use"
        yield warning("port", text, "torchrun --master-port 29511; trainwright train finds a free one itself")
    else:
        yield ok("port", f"{USUAL_PORT} is free")

"""This machine's Inventory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from trainwright.errors import ExitCode, UserError
from trainwright.hardware import catalog
from trainwright.hardware.host import apple_gpu, processor, read_host
from trainwright.hardware.inventory import Device, DeviceKind, Inventory
from trainwright.hardware.nvml import NvmlGpu, NvmlUnavailableError, read_nvml
from trainwright.hardware.reading import NOT_AVAILABLE
from trainwright.hardware.visible import VisibleGpu, visible_devices

_NO_UTILITY: Final = (
    "the NVIDIA driver's GPUs are here, but not its management library: memory, load and links are not available. In a "
    "container, start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
)


def local_inventory(
    device: DeviceKind | Literal["auto"] = "auto",
    *,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> Inventory:
    """This machine: its CUDA GPUs, else Apple's GPU, else the CPU; or the kind that is asked for.

    `root` is the file system that /proc, /sys and /dev are under. Raises UserError (exit 4) when the kind asked for is
    not there or none of it can be used.
    """
    host, notes = read_host(root)
    inventory = Inventory(devices=(), host=host, notes=notes)
    if device == "cuda" or (device == "auto" and sys.platform != "darwin"):
        inventory = _with_nvidia(inventory, environment, root)
    if not inventory.usable and device != "cuda":
        apple = apple_gpu(host) if device != "cpu" else None
        other = processor(host, root) if apple is None and device != "mps" else apple
        inventory = replace(inventory, devices=inventory.devices + (() if other is None else (other,)))
    if not inventory.usable:
        message = f"there is no {device} device that can be used on this machine"
        raise UserError(message, problems=inventory.notes, exit_code=ExitCode.MISSING)
    return inventory


def _with_nvidia(inventory: Inventory, environment: Mapping[str, str], root: Path) -> Inventory:
    try:
        report = read_nvml()
    except NvmlUnavailableError as error:
        gpus, notes = _without_nvml(root, str(error))
    else:
        gpus, notes = report.gpus, report.notes
        inventory = replace(inventory, driver_version=report.driver_version, cuda_version=report.cuda_version)
    devices, seen_notes = _numbered_as_cuda(gpus, environment)
    unknown = {device.name for device in devices if device.catalog_key is None}
    notes = (
        *notes,
        *seen_notes,
        *(f"{name} is not in the catalogue: its speed is not known" for name in sorted(unknown)),
        *inventory.notes,
    )
    return replace(inventory, devices=devices, notes=notes)


def _without_nvml(root: Path, why: str) -> tuple[tuple[NvmlGpu, ...], tuple[str, ...]]:
    """What the kernel module says of its GPUs, for a container that has them and not NVML."""
    gpus = []
    for index, file in enumerate(sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))):
        pairs = (line.partition(":") for line in file.read_text().splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        name = fields.get("Model", "NVIDIA GPU")
        device = Device(
            kind="cuda",
            name=name,
            index=index,
            uuid=fields.get("GPU UUID", NOT_AVAILABLE),
            catalog_key=catalog.identify(name, NOT_AVAILABLE),
        )
        gpus.append(NvmlGpu(device))
    in_reach = bool(gpus) or any((root / "dev").glob("nvidia[0-9]*"))
    return tuple(gpus), (why, _NO_UTILITY) if in_reach else (why,)


def _numbered_as_cuda(
    gpus: Sequence[NvmlGpu], environment: Mapping[str, str]
) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """Every GPU or MIG instance with its CUDA ordinal, and notes on what is hidden or may be numbered otherwise."""
    devices = tuple(
        device for gpu in gpus for device in (gpu.instances if gpu.instances is not None else (gpu.device,))
    )
    if not devices:
        return (), ()
    value = environment.get("CUDA_VISIBLE_DEVICES")
    names = [
        VisibleGpu(_name(gpu.device), None if gpu.instances is None else tuple(map(_name, gpu.instances)))
        for gpu in gpus
    ]
    visible = visible_devices(names, value)
    ordinals = {name: ordinal for ordinal, name in enumerate(visible.uuids)}
    numbered = tuple(
        replace(device, cuda_ordinal=ordinals.get(_name(device)), allowed=_name(device) in visible.allowed)
        for device in devices
    )
    return numbered, (*visible.notes, *_numbering_notes(numbered, value, environment.get("CUDA_DEVICE_ORDER")))


def _name(device: Device) -> str:
    return device.uuid if isinstance(device.uuid, str) else f"number {device.index}"


def _numbering_notes(devices: Sequence[Device], visible: str | None, order: str | None) -> Iterator[str]:
    hidden = sum(not device.allowed for device in devices)
    if visible and hidden:
        yield f"CUDA_VISIBLE_DEVICES={visible} hides {hidden} of {len(devices)} GPUs"
    if order != "PCI_BUS_ID" and len({device.name for device in devices if device.mig is None}) > 1:
        yield (
            "these GPUs differ and CUDA_DEVICE_ORDER is not PCI_BUS_ID: a program started by hand may number them "
            "otherwise; the CUDA numbers here are in PCI order, as in what Trainwright starts"
        )

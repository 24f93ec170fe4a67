"""The part of an Inventory that a job was asked to use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.inventory import Device, Inventory

GpuRequest: TypeAlias = int | str | Sequence[int | str]
"""`auto`; how many, as a number; or which, as a list or as text like that of CUDA_VISIBLE_DEVICES."""


def select_devices(inventory: Inventory, gpus: GpuRequest = "auto") -> tuple[Device, ...]:
    """The devices that a job gets: all that can be used (`auto`), the first N, or those that are named.

    A number is how many. A list, or text, is which: the numbers of nvidia-smi on each node, UUIDs or MIG ids; `0,1`,
    `0 1`, [0, 1] and the same in CUDA_VISIBLE_DEVICES mean the same (X-15). Raises UserError with all that is wrong
    and what there is.
    """
    if gpus == "auto":
        return inventory.usable
    if isinstance(gpus, int):
        return _first(inventory, gpus)
    chosen: list[Device] = []
    problems: list[str] = []
    for entry in gpus.replace(",", " ").split() if isinstance(gpus, str) else map(str, gpus):
        named = [device for device in inventory.devices if device.kind == "cuda" and _is_named(device, entry)]
        if (problem := _problem_of(named, chosen)) is None:
            chosen += named
        else:
            problems.append(f"`{entry}` {problem}")
    if len(chosen) > 1 and any(device.mig is not None for device in chosen):
        problems.append("a process can use one MIG instance, and no other GPU beside it: name one")
    if problems or not chosen:
        raise _missing("the GPUs asked for cannot be used", inventory, problems or ["no GPU is named"])
    return tuple(sorted(chosen, key=lambda device: device.node))


def _problem_of(named: Sequence[Device], chosen: Sequence[Device]) -> str | None:
    """Return why the devices that an entry names cannot join those that are chosen."""
    if not named:
        return "names no GPU here"
    if not all(device.allowed for device in named):
        return "is hidden by CUDA_VISIBLE_DEVICES"
    if len(named) > len({device.node for device in named}):
        return f"names {len(named)} GPUs: write more of the UUID"
    return "is there twice" if named[0] in chosen else None


def _first(inventory: Inventory, count: int) -> tuple[Device, ...]:
    gpus = [device for device in inventory.usable if device.kind != "cpu"]
    if count < 1:
        raise UserError(f"{count} GPUs make no run: ask for 1 or more")
    if count > len(gpus):
        raise _missing(f"{count} GPUs asked for, {len(gpus)} can be used", inventory)
    return tuple(gpus[:count])


def _is_named(device: Device, entry: str) -> bool:
    if entry.isdigit():
        return device.index == int(entry)
    return entry.startswith(("GPU-", "MIG-")) and isinstance(device.uuid, str) and device.uuid.startswith(entry)


def _missing(message: str, inventory: Inventory, problems: Sequence[str] = ()) -> UserError:
    labels = [device.label for device in inventory.devices if device.kind != "cpu" and device.allowed]
    hint = f"there are: {', '.join(labels)}" if labels else "there is no GPU that can be used; see `trainwright gpus`"
    return UserError(message, problems=problems, hints=[hint], exit_code=ExitCode.MISSING)


def cuda_environment(devices: Sequence[Device]) -> dict[str, str]:
    """The variables that give a child process exactly these CUDA devices of one node, in this order.

    UUIDs, as numbers mean other GPUs inside a container or under a batch system's device limits.
    """
    by_uuid = all(isinstance(device.uuid, str) for device in devices)
    names = [str(device.uuid if by_uuid else device.index) for device in devices]
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(names)}

"""The Inventory that a command is asked about: this machine, some of its GPUs, one written down, or one in a file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainwright.errors import UserError
from trainwright.hardware.inventory import Device, Host, Inventory, NvLink, parse_inventory
from trainwright.hardware.reading import NOT_AVAILABLE
from trainwright.hardware.selection import select_devices

_WHICH: Final = re.compile(r"^(\s*(\d+|GPU-[\w-]+|MIG-[\w/-]+)\s*,?)+$")
_KINDS: Final = ("cuda", "mps", "cpu")


def asked_inventory(spec: str | None, device: str = "auto") -> Inventory:
    """Return this machine's GPUs (None or `auto`), those named (`0,1`, UUIDs, MIG ids), or ones written down.

    `device` is the kind asked for on this machine: auto, cuda, mps or cpu.

    Raises:
        UserError: what is named is not there, or cannot be read.
    """
    if spec is not None and spec != "auto" and not _WHICH.match(spec):
        return parse_inventory(spec)
    from trainwright.hardware.local import local_inventory  # NVML's bindings and psutil take a while to import

    inventory = local_inventory(device)  # type: ignore[arg-type]
    if spec is None or spec == "auto":
        return inventory
    return dataclasses.replace(inventory, devices=select_devices(inventory, spec))


def stored_inventory(path: Path) -> Inventory:
    """Return the Inventory in a file: what `trainwright gpus --json` printed elsewhere, or one line such as `h100:8x2`.

    Raises:
        UserError: the file cannot be read as either.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the inventory {path} cannot be read: {error}") from None
    if not text.lstrip().startswith("{"):
        return parse_inventory(text.strip())
    try:
        return _from_json(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no inventory: {error or type(error).__name__}",
            hints=["write it on the machine that it describes: trainwright gpus --json > inventory.json"],
        ) from None


def _from_json(data: Mapping[str, Any]) -> Inventory:
    devices = tuple(_device(record) for record in data["devices"])
    if not devices:
        raise ValueError("it names no device")
    nodes = int(data.get("nodes", 1))
    host = Host(**{f.name: _reading(data["host"].get(f.name)) for f in dataclasses.fields(Host)})
    return Inventory(devices=devices, host=host, nodes=nodes, notes=("this inventory was read from a file",))


def _device(record: Mapping[str, Any]) -> Device:
    if record["kind"] not in _KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(_KINDS)}")
    capability, nvlink = record.get("compute_capability"), record.get("nvlink")
    links = (
        NvLink(links=nvlink["links"], generation=_reading(nvlink["generation"]), peers=tuple(nvlink["peers"]))
        if nvlink
        else None
    )
    numbers = ("memory_total_bytes", "memory_free_bytes", "pcie_generation", "pcie_width", "numa_node")
    return Device(
        kind=record["kind"],
        name=str(record["name"]),
        index=record.get("index"),
        cuda_ordinal=record.get("cuda_ordinal"),
        node=int(record.get("node", 0)),
        uuid=_reading(record.get("uuid")),
        compute_capability=NOT_AVAILABLE if capability is None else (int(capability[0]), int(capability[1])),
        nvlink=links,
        catalog_key=record.get("catalog_key"),
        **{name: _number(record, name) for name in numbers},
    )


def _number(record: Mapping[str, Any], name: str) -> Any:
    value = record.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"`{name}` must be a whole number, not {value!r}")
    return _reading(value)


def _reading(value: Any) -> Any:
    return NOT_AVAILABLE if value is None else value

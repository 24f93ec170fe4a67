"""The Inventory: devices, host and nodes, found on this machine or only written down.

A reading that should be there and is not is NOT_AVAILABLE, which prints as "not available" and is null in JSON. `None`
says that there is nothing to read: a GPU without NVLink, a GPU that CUDA does not see, the NVML index of a CPU.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from trainwright.errors import UserError
from trainwright.hardware import catalog
from trainwright.hardware.reading import GIB, NOT_AVAILABLE, NotAvailable, Reading

DeviceKind: TypeAlias = Literal["cuda", "mps", "cpu"]


@dataclass(frozen=True, kw_only=True)
class NvLink:
    """The NVLink connections of one GPU: active links, generation (1 to 5) and the NVML indices they reach."""

    links: int
    generation: Reading[int]
    peers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Mig:
    """Which slice of which GPU a MIG instance is; `compute_slices` of the 7 that an A100 or H100 has."""

    parent_index: int
    gpu_instance: Reading[int]
    compute_instance: Reading[int]
    compute_slices: Reading[int]


@dataclass(frozen=True, kw_only=True)
class DeviceProcess:
    """One process that holds memory of a GPU; user and command are not available across a container's border."""

    pid: int
    user: Reading[str]
    command: Reading[str]
    memory_bytes: Reading[int]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, MIG instance, Apple GPU or the CPU, as it was at the moment of reading.

    `index` is NVML's, the number that nvidia-smi prints (that of the parent for a MIG instance); `cuda_ordinal` is the
    number that CUDA gives it under CUDA_VISIBLE_DEVICES in PCI order, None when CUDA does not see it. `allowed` is
    false when CUDA_VISIBLE_DEVICES hides it; a MIG instance may be allowed and not seen, as CUDA sees only one of them.
    `bf16_instructions` are a processor's own, as /proc/cpuinfo names them. `catalog_key` is None for an unknown model.
    """

    kind: DeviceKind
    name: str
    index: int | None = None
    cuda_ordinal: int | None = None
    allowed: bool = True
    node: int = 0
    uuid: Reading[str] = NOT_AVAILABLE
    memory_total_bytes: Reading[int] = NOT_AVAILABLE
    memory_free_bytes: Reading[int] = NOT_AVAILABLE
    compute_capability: Reading[tuple[int, int]] = NOT_AVAILABLE
    pcie_generation: Reading[int] = NOT_AVAILABLE
    pcie_width: Reading[int] = NOT_AVAILABLE
    numa_node: Reading[int] = NOT_AVAILABLE
    nvlink: Reading[NvLink | None] = NOT_AVAILABLE
    mig: Mig | None = None
    processes: Reading[tuple[DeviceProcess, ...]] = NOT_AVAILABLE
    bf16_instructions: tuple[str, ...] = ()
    catalog_key: str | None = None

    @property
    def usable(self) -> bool:
        """Whether a job gets this device without naming it: all but GPUs that CUDA does not see."""
        return self.kind != "cuda" or self.cuda_ordinal is not None

    @property
    def label(self) -> str:
        """Short text for lists and errors: `0 (NVIDIA A100-SXM4-80GB)`, by MIG id where the index is not enough."""
        if self.mig is not None:
            return f"{self.uuid} ({self.name})"
        return self.name if self.index is None else f"{self.index} ({self.name})"


@dataclass(frozen=True, kw_only=True)
class Host:
    """Memory and cores that this process may use on one node, after cgroup limits and CPU affinity."""

    memory_total_bytes: Reading[int] = NOT_AVAILABLE
    memory_available_bytes: Reading[int] = NOT_AVAILABLE
    cores: Reading[int] = NOT_AVAILABLE
    numa_nodes: Reading[int] = NOT_AVAILABLE


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All devices of `nodes` machines, the host of each (all alike), and what a reader has to know about them.

    `driver_version` and `cuda_version` (the newest that the driver supports) are None where there is no NVIDIA driver.
    """

    devices: tuple[Device, ...]
    host: Host
    nodes: int = 1
    driver_version: Reading[str] | None = None
    cuda_version: Reading[tuple[int, int]] | None = None
    notes: tuple[str, ...] = ()

    @property
    def usable(self) -> tuple[Device, ...]:
        """The devices that a job can be given, in the order of their CUDA ordinals within each node."""
        usable = [device for device in self.devices if device.usable]
        return tuple(sorted(usable, key=lambda device: (device.node, device.cuda_ordinal or 0)))

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the usable devices, each once, in order; more than one is a mixed set."""
        return tuple(dict.fromkeys(device.name for device in self.usable))

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; a reading that is not available is null."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}


def _plain(value: object) -> Any:
    match value:
        case NotAvailable():
            return None
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value


_SizedModel: TypeAlias = tuple[catalog.GpuSpec, int | None]
"""A model and, for one that shares the host's memory (`m2-max-64gb`), the size of that memory in bytes."""
_PART: Final = re.compile(r"^(?P<model>[^:=]+)(?::(?P<count>\d+)(?:x(?P<nodes>\d+))?)?$")
MOST_GPUS_OF_NODE: Final = 64
"""Larger nodes are not sold: 16 GPUs in a DGX-2, 32 in one chassis of PCIe switches."""
MOST_NODES: Final = 1024
_HOST: Final = re.compile(r"^host=(?P<gib>\d+(?:\.\d+)?)\s*gi?b?$", re.IGNORECASE)


def parse_inventory(text: str) -> Inventory:
    """An Inventory that is only written down: `a100-80gb:2,v100-32gb:2` on one node, `h100:8x4` on each of 4.

    `host=16gib` adds the host memory of each node. Parts without `xN` share the first node; those with it are nodes of
    their own. Raises UserError with all the parts that cannot be read.
    """
    problems: list[str] = []
    hints: list[str] = []
    host = Host()
    first_node: list[_SizedModel] = []
    more_nodes: list[list[_SizedModel]] = []
    for part in (part.strip() for part in text.split(",")):
        if (memory := _HOST.match(part)) is not None:
            host = Host(memory_total_bytes=int(float(memory["gib"]) * GIB))
            continue
        try:
            models, nodes = _parse_part(part)
        except UserError as error:
            problems.append(error.message)
            hints += error.hints
            continue
        if nodes is None:
            first_node += models
        else:
            more_nodes += [models] * nodes
    node_models = [node for node in [first_node, *more_nodes] if node]
    if problems or not node_models:
        raise UserError(f"cannot read the inventory `{text}`", problems=problems or ["no GPU is named"], hints=hints)
    note = "this inventory is only written down: free memory, links in use and host are what is assumed or not known"
    return Inventory(devices=_written_devices(node_models), host=host, nodes=len(node_models), notes=(note,))


def _parse_part(part: str) -> tuple[list[_SizedModel], int | None]:
    """Return the GPUs of one node, and how many such nodes there are; None where they share the first.

    Raises:
        UserError: it is written otherwise, or its model is not in the catalogue.
    """
    match = _PART.match(part)
    count, nodes = (int(match["count"] or 1), int(match["nodes"] or 1)) if match is not None else (0, 0)
    if match is None or not count or not nodes:
        raise UserError(f"`{part}`: write `model`, `model:count`, `model:countxnodes` or `host=16gib`")
    if count > MOST_GPUS_OF_NODE:
        several = f"{match['model']}:8x{min(count // 8, MOST_NODES)}"
        raise UserError(
            f"`{part}`: a node has at most {MOST_GPUS_OF_NODE} GPUs here",
            hints=[f"write several nodes as `model:countxnodes`, such as {several}"],
        )
    if nodes > MOST_NODES:
        raise UserError(f"`{part}`: at most {MOST_NODES:,} nodes are planned")
    return [_find_sized(match["model"].strip())] * count, None if match["nodes"] is None else nodes


def written_devices(nodes: Sequence[Sequence[str]]) -> tuple[Device, ...]:
    """Return the GPUs of nodes of which only the models are known, given by their keys in the catalogue."""
    gpus = catalog.catalog().gpus
    return _written_devices([[(gpus[key], gpus[key].total_bytes) for key in keys] for keys in nodes])


def _find_sized(text: str) -> _SizedModel:
    sized = catalog.split_size(text)
    if sized is not None:
        gpu = catalog.catalog().gpus.get(sized[0])
        if gpu is not None and sized[1] in gpu.memory_options_gib:
            return gpu, sized[1] * GIB
    gpu = catalog.find(text)
    return gpu, gpu.total_bytes


def _written_devices(nodes: list[list[_SizedModel]]) -> tuple[Device, ...]:
    return tuple(device for number, models in enumerate(nodes) for device in _written_node(number, models))


def _written_node(node: int, models: list[_SizedModel]) -> list[Device]:
    return [_written_device(node, number, models) for number in range(len(models))]


def _written_device(node: int, number: int, models: list[_SizedModel]) -> Device:
    gpu, total_bytes = models[number]
    peers = tuple(other for other, (model, _) in enumerate(models) if model.key == gpu.key and other != number)
    wired = gpu.nvlink is not None and gpu.nvlink.form == "board" and bool(peers)
    return Device(
        kind=gpu.kind,
        name=gpu.name,
        index=number,
        cuda_ordinal=number if gpu.kind == "cuda" else None,
        node=node,
        memory_total_bytes=NOT_AVAILABLE if total_bytes is None else total_bytes,
        compute_capability=gpu.compute_capability or NOT_AVAILABLE,
        pcie_generation=gpu.pcie_generation or NOT_AVAILABLE,
        pcie_width=gpu.pcie_width or NOT_AVAILABLE,
        nvlink=(
            NvLink(links=gpu.nvlink.links, generation=gpu.nvlink.generation, peers=peers)
            if gpu.nvlink is not None and wired
            else None
        ),
        catalog_key=gpu.key,
    )

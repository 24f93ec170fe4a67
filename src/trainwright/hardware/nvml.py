"""NVIDIA GPUs as NVML reports them (nvidia-ml-py); every reading may be missing, every GPU may be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import psutil
import pynvml

from trainwright.hardware import catalog
from trainwright.hardware.inventory import Device, DeviceProcess, Mig, NvLink
from trainwright.hardware.reading import NOT_AVAILABLE, NotAvailable, Reading, printable

# nvml.h, NVML_NVLINK_VERSION_*: a running number for 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0, 6.0.
_NVLINK_GENERATION: Final = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
_GONE: Final = (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired)


class NvmlUnavailableError(Exception):
    """NVML does not start; the message is a sentence for the user."""


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU that answers, and its MIG instances; None when it is not in MIG mode."""

    device: Device
    instances: tuple[Device, ...] | None = None


@dataclass(frozen=True)
class NvmlReport:
    """All GPUs that this process may use in PCI order, the driver, and what could not be read."""

    gpus: tuple[NvmlGpu, ...]
    driver_version: Reading[str]
    cuda_version: Reading[tuple[int, int]]
    notes: tuple[str, ...]


@contextmanager
def _session() -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound as error:
        raise NvmlUnavailableError("no NVIDIA driver: libnvidia-ml.so.1 is not on this machine") from error
    except pynvml.NVMLError_DriverNotLoaded as error:
        raise NvmlUnavailableError(
            "the NVIDIA driver is not loaded: NVML is there, the kernel module does not answer"
        ) from error
    except pynvml.NVMLError_LibRmVersionMismatch as error:
        raise NvmlUnavailableError(
            "the NVIDIA driver was updated under a running kernel module: restart the machine"
        ) from error
    except pynvml.NVMLError as error:
        raise NvmlUnavailableError(f"NVML does not start: {error}") from error
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def read_nvml() -> NvmlReport:
    """Read every GPU once; raises NvmlUnavailableError where NVML does not start."""
    with _session():
        handles: dict[int, Any] = {}
        notes: list[str] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
            except _GONE as error:
                notes.append(_lost(index, error))
            except pynvml.NVMLError as error:
                notes.append(f"GPU {index} is not open to this process: {error}")
        gpus: list[NvmlGpu] = []
        for index, handle in handles.items():
            try:
                gpus.append(_gpu(index, handle))
            except _GONE as error:
                notes.append(_lost(index, error))
        present = {gpu.device.index: handles[gpu.device.index or 0] for gpu in gpus}
        gpus = [replace(gpu, device=_with_peers(gpu.device, present)) for gpu in gpus]
        cuda = _read(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return NvmlReport(
            gpus=tuple(gpus),
            driver_version=_read(pynvml.nvmlSystemGetDriverVersion),
            cuda_version=cuda if isinstance(cuda, NotAvailable) else (cuda // 1000, cuda % 1000 // 10),
            notes=(*notes, *(note for gpu in gpus for note in _mig_notes(gpu))),
        )


def _lost(index: int, error: Exception) -> str:
    return (
        f"GPU {index} is lost ({error}) and left out: look for `Xid` in `dmesg`, then try "
        f"`nvidia-smi --gpu-reset -i {index}` or restart the machine"
    )


def _read(query: Callable[..., Any], *args: object) -> Any:
    try:
        return query(*args)
    except _GONE:
        raise
    except pynvml.NVMLError:
        return NOT_AVAILABLE


def _gpu(index: int, handle: Any) -> NvmlGpu:
    device = _device(index, handle)
    mode = _read(pynvml.nvmlDeviceGetMigMode, handle)
    if isinstance(mode, NotAvailable) or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return NvmlGpu(device)
    slots = _read(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)
    handles = [
        _read(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
        for slot in range(0 if isinstance(slots, NotAvailable) else slots)
    ]
    instances = [_instance(device, instance) for instance in handles if not isinstance(instance, NotAvailable)]
    return NvmlGpu(device, tuple(instances))


def _device(index: int, handle: Any) -> Device:
    name = printable(_read(pynvml.nvmlDeviceGetName, handle))
    total, free = _memory(handle)
    return Device(
        kind="cuda",
        name=name,
        index=index,
        uuid=_read(pynvml.nvmlDeviceGetUUID, handle),
        memory_total_bytes=total,
        memory_free_bytes=free,
        compute_capability=_read(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        # An idle GPU trains its link down, so the generation is the one it can reach here; the width does not change.
        pcie_generation=_read(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_read(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        numa_node=_numa_node(handle),
        nvlink=_nvlink(handle),
        processes=_processes(handle),
        catalog_key=catalog.identify(name, total),
    )


def _instance(parent: Device, handle: Any) -> Device:
    total, free = _memory(handle)
    attributes = _read(pynvml.nvmlDeviceGetAttributes_v2, handle)
    name = _read(pynvml.nvmlDeviceGetName, handle)
    assert parent.index is not None
    return replace(
        parent,
        name=f"{parent.name} MIG" if isinstance(name, NotAvailable) else printable(name),
        uuid=_read(pynvml.nvmlDeviceGetUUID, handle),
        memory_total_bytes=total,
        memory_free_bytes=free,
        nvlink=None,
        mig=Mig(
            parent_index=parent.index,
            gpu_instance=_read(pynvml.nvmlDeviceGetGpuInstanceId, handle),
            compute_instance=_read(pynvml.nvmlDeviceGetComputeInstanceId, handle),
            compute_slices=(
                NOT_AVAILABLE if isinstance(attributes, NotAvailable) else attributes.computeInstanceSliceCount
            ),
        ),
        processes=_processes(handle),
    )


def _memory(handle: Any) -> tuple[Reading[int], Reading[int]]:
    memory = _read(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if isinstance(memory, NotAvailable) or memory.total == 0:
        return NOT_AVAILABLE, NOT_AVAILABLE
    return memory.total, memory.free


def _numa_node(handle: Any) -> Reading[int]:
    words = _read(pynvml.nvmlDeviceGetMemoryAffinity, handle, 4, pynvml.NVML_AFFINITY_SCOPE_NODE)
    if isinstance(words, NotAvailable):
        return NOT_AVAILABLE
    nodes = [64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    # Several nodes at the same distance are no answer to "which".
    return nodes[0] if len(nodes) == 1 else NOT_AVAILABLE


def _nvlink(handle: Any) -> Reading[NvLink | None]:
    states = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError_InvalidArgument:
            break
        except pynvml.NVMLError_NotSupported:
            # Asked of link 0: the GPU has none. Of a later one: it has no more.
            break
        except _GONE:
            raise
        except pynvml.NVMLError:
            return NOT_AVAILABLE
    active = [link for link, state in enumerate(states) if state]
    if not active:
        return None
    version = _read(pynvml.nvmlDeviceGetNvLinkVersion, handle, active[0])
    return NvLink(links=len(active), generation=_NVLINK_GENERATION.get(version, NOT_AVAILABLE), peers=())


def _with_peers(device: Device, handles: dict[int | None, Any]) -> Device:
    if not isinstance(device.nvlink, NvLink):
        return device
    peers = tuple(
        index
        for index, handle in handles.items()
        if index is not None
        and index != device.index
        and _read(pynvml.nvmlDeviceGetP2PStatus, handles[device.index], handle, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        == pynvml.NVML_P2P_STATUS_OK
    )
    return replace(device, nvlink=replace(device.nvlink, peers=peers))


def _processes(handle: Any) -> Reading[tuple[DeviceProcess, ...]]:
    by_pid: dict[int, DeviceProcess] = {}
    for newest, older in (
        (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetComputeRunningProcesses_v2),
        (pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, pynvml.nvmlDeviceGetGraphicsRunningProcesses_v2),
    ):
        listed: Sequence[Any] | NotAvailable = _read(newest, handle)
        if isinstance(listed, NotAvailable):
            listed = _read(older, handle)
        if isinstance(listed, NotAvailable):
            return NOT_AVAILABLE
        for process in listed:
            used = process.usedGpuMemory
            by_pid[process.pid] = _process(process.pid, NOT_AVAILABLE if used is None else used)
    return tuple(by_pid.values())


def _process(pid: int, memory_bytes: Reading[int]) -> DeviceProcess:
    try:
        process = psutil.Process(pid)
        user, command = process.username(), process.name()
    except (psutil.Error, KeyError):
        return DeviceProcess(pid=pid, user=NOT_AVAILABLE, command=NOT_AVAILABLE, memory_bytes=memory_bytes)
    return DeviceProcess(pid=pid, user=printable(user), command=printable(command), memory_bytes=memory_bytes)


def _mig_notes(gpu: NvmlGpu) -> Iterator[str]:
    if gpu.instances is None:
        return
    if gpu.instances:
        yield (
            f"GPU {gpu.device.label} is in MIG mode: its {len(gpu.instances)} instances are listed in its place; "
            "a process can use one of them, and they cannot exchange data directly"
        )
    else:
        yield (
            f"GPU {gpu.device.label} is in MIG mode without an instance, so no program can use it: make one "
            f"with `nvidia-smi mig -i {gpu.device.index} -cgi PROFILE -C`, or leave MIG mode with "
            f"`nvidia-smi -i {gpu.device.index} -mig 0`"
        )

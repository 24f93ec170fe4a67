"""NVIDIA GPUs through NVML, sample after sample in one session: a reading that fails is not available."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import pynvml

from trainwright.hardware.reading import printable
from trainwright.watch.samples import GpuProcess, GpuSample, MigInstance

_GONE: Final = (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired)
_ALL_LINKS: Final = 0xFFFFFFFF
"""nvml.h, NVML_FI_DEV_NVLINK_THROUGHPUT_*: the scope that sums over all links."""
# nvml.h: bytes over PCIe since the driver started, and KiB over NVLink.
_COUNTERS: Final = {
    "pcie_received_bytes_s": (pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 1),
    "pcie_sent_bytes_s": (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 1),
    "nvlink_received_bytes_s": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, 1024),
    "nvlink_sent_bytes_s": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 1024),
}
THROTTLE_REASONS: Final = {
    "gpu_idle": pynvml.nvmlClocksThrottleReasonGpuIdle,
    "application_clocks": pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting,
    "sw_power_cap": pynvml.nvmlClocksThrottleReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "sync_boost": pynvml.nvmlClocksThrottleReasonSyncBoost,
    "sw_thermal_slowdown": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "hw_thermal_slowdown": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    "display_clock": pynvml.nvmlClocksThrottleReasonDisplayClockSetting,
}


@dataclass
class _Gpu:
    """What is kept of a GPU from one sample to the next."""

    index: int
    handle: Any = None
    fixed: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Of each counter, when it was read and what it showed."""
    xids: list[int] | None = None


class GpuReader:
    """Reads all GPUs again and again; without a driver there are none, and `note` says why."""

    def __init__(self) -> None:
        self.note: str | None = None
        self._gpus: list[_Gpu] = []
        self._events: Any = None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.note = f"no GPU is sampled: NVML does not start ({error})"
            return
        self._gpus = [_Gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
        self._listen_for_xids()

    def __enter__(self) -> GpuReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.note is None:
            pynvml.nvmlShutdown()

    def read(self) -> tuple[GpuSample, ...]:
        """Return a sample of every GPU, of a lost one that it is lost."""
        self._take_xids()
        return tuple(self._sample(gpu) for gpu in self._gpus)

    def _sample(self, gpu: _Gpu) -> GpuSample:
        try:
            if gpu.handle is None:
                gpu.handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
            if not gpu.fixed:
                gpu.fixed = _fixed(gpu.handle)
            return GpuSample(index=gpu.index, **gpu.fixed, **self._readings(gpu))
        except _GONE:
            return GpuSample(index=gpu.index, lost=True, **_identity(gpu.fixed), **_xids(gpu))
        except pynvml.NVMLError:
            return GpuSample(index=gpu.index)

    def _readings(self, gpu: _Gpu) -> dict[str, Any]:
        handle = gpu.handle
        memory = _memory(handle)
        rates = _read(pynvml.nvmlDeviceGetUtilizationRates, handle)
        reasons = _read(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        power_mw = _read(pynvml.nvmlDeviceGetPowerUsage, handle)
        errors = (handle, pynvml.NVML_VOLATILE_ECC)
        return {
            "memory_total_bytes": memory and memory.total,
            "memory_used_bytes": memory and memory.used,
            "utilization_pct": rates and rates.gpu,
            "memory_utilization_pct": rates and rates.memory,
            "temperature_c": _read(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            "power_w": None if power_mw is None else power_mw / 1000,
            "sm_clock_mhz": _read(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": _read(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
            "throttle_reasons": None if reasons is None else _names(reasons),
            "ecc_corrected_total": _ecc(pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, *errors),
            "ecc_uncorrected_total": _ecc(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, *errors),
            "processes": _processes(handle),
            "instances": _instances(handle),
            **_traffic(gpu),
            **_xids(gpu),
        }

    def _listen_for_xids(self) -> None:
        self._events = _read(pynvml.nvmlEventSetCreate)
        for gpu in self._gpus if self._events is not None else ():
            with suppress(pynvml.NVMLError):
                gpu.handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
                pynvml.nvmlDeviceRegisterEvents(gpu.handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
                gpu.xids = []

    def _take_xids(self) -> None:
        while any(gpu.xids is not None for gpu in self._gpus):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                index = pynvml.nvmlDeviceGetIndex(event.device)
            except pynvml.NVMLError:
                return
            for gpu in self._gpus:
                if gpu.index == index and gpu.xids is not None:
                    gpu.xids.append(event.eventData)


def _read(query: Callable[..., Any], *args: object) -> Any:
    """Return a reading, None where this GPU or driver has none; a lost GPU raises."""
    try:
        return query(*args)
    except _GONE:
        raise
    except pynvml.NVMLError:
        return None


def _fixed(handle: Any) -> dict[str, Any]:
    """Return what does not change while a run goes on."""
    name, limit_mw = _read(pynvml.nvmlDeviceGetName, handle), _read(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return {
        "name": None if name is None else printable(name),
        "uuid": _read(pynvml.nvmlDeviceGetUUID, handle),
        "power_limit_w": None if limit_mw is None else limit_mw / 1000,
        "sm_clock_max_mhz": _read(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
    }


def _identity(fixed: dict[str, Any]) -> dict[str, Any]:
    return {name: fixed.get(name) for name in ("name", "uuid")}


def _memory(handle: Any) -> Any:
    """Return memory as nvidia-smi shows it: the second version leaves out what the driver keeps for itself."""
    memory = _read(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if memory is None:
        memory = _read(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return memory if memory is not None and memory.total else None


def _names(reasons: int) -> tuple[str, ...]:
    return tuple(name for name, bit in THROTTLE_REASONS.items() if reasons & bit)


def _ecc(kind: int, handle: Any, since: int) -> int | None:
    count: int | None = _read(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, since)
    return count


def _processes(handle: Any) -> tuple[GpuProcess, ...] | None:
    listed = _read(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if listed is None:
        return None
    return tuple(GpuProcess(pid=process.pid, memory_bytes=process.usedGpuMemory) for process in listed)


def _instances(handle: Any) -> tuple[MigInstance, ...] | None:
    mode = _read(pynvml.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    slots = _read(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    handles = [_read(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot) for slot in range(slots)]
    return tuple(_instance(instance) for instance in handles if instance is not None)


def _instance(handle: Any) -> MigInstance:
    name, memory = _read(pynvml.nvmlDeviceGetName, handle), _memory(handle)
    return MigInstance(
        uuid=_read(pynvml.nvmlDeviceGetUUID, handle),
        name=None if name is None else printable(name),
        memory_total_bytes=memory and memory.total,
        memory_used_bytes=memory and memory.used,
    )


def _traffic(gpu: _Gpu) -> dict[str, float | None]:
    """Return the rates since the last sample; where the driver has no counters of PCIe, its own over 20 ms."""
    wanted = [(number, _ALL_LINKS if "nvlink" in name else 0) for name, (number, _) in _COUNTERS.items()]
    values = _read(pynvml.nvmlDeviceGetFieldValues, gpu.handle, wanted)
    now_s = time.monotonic()
    rates: dict[str, float | None] = {}
    for place, (name, (_, unit_bytes)) in enumerate(_COUNTERS.items()):
        if values is None or values[place].nvmlReturn != pynvml.NVML_SUCCESS:
            rates[name] = _pcie_rate(gpu.handle, name)
            continue
        count = unit_bytes * values[place].value.ullVal
        before_s, before = gpu.counts.get(name, (now_s, count))
        # A counter that fell was reset with its GPU.
        rates[name] = (count - before) / (now_s - before_s) if now_s > before_s and count >= before else None
        gpu.counts[name] = (now_s, count)
    return rates


def _pcie_rate(handle: Any, name: str) -> float | None:
    if "nvlink" in name:
        return None
    way = pynvml.NVML_PCIE_UTIL_RX_BYTES if "received" in name else pynvml.NVML_PCIE_UTIL_TX_BYTES
    kib_s = _read(pynvml.nvmlDeviceGetPcieThroughput, handle, way)
    return None if kib_s is None else 1024.0 * kib_s


def _xids(gpu: _Gpu) -> dict[str, Any]:
    if gpu.xids is None:
        return {"xid_total": None, "last_xid": None}
    return {"xid_total": len(gpu.xids), "last_xid": gpu.xids[-1] if gpu.xids else None}

"""One sample of a node: what its GPUs, its host and its ranks were doing at a moment. None is "not available", never 0.

A rate is that of the time since the sample before; a `_total` counts on, so that what lies between two samples can be
told even when others in between were thinned out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

from trainwright.runs.values import mapping, mappings, of_kind, understood

SCHEMA_VERSION = 1

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class MigInstance:
    """One instance of a GPU in MIG mode."""

    uuid: str | None = None
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process on a GPU, numbered as NVML sees it: in a container that is the host's numbering."""

    pid: int
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One NVIDIA GPU; `lost` is one that no longer answers. Memory is what nvidia-smi shows as used."""

    index: int
    uuid: str | None = None
    name: str | None = None
    lost: bool = False
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization_pct: int | None = None
    memory_utilization_pct: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    pcie_received_bytes_s: float | None = None
    pcie_sent_bytes_s: float | None = None
    nvlink_received_bytes_s: float | None = None
    nvlink_sent_bytes_s: float | None = None
    ecc_corrected_total: int | None = None
    ecc_uncorrected_total: int | None = None
    xid_total: int | None = None
    """Xid events since the sampler started."""
    last_xid: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    instances: tuple[MigInstance, ...] | None = None
    """MIG instances; None on a GPU that is not in MIG mode."""

    @property
    def memory_pct(self) -> float | None:
        """Used memory as a share of all."""
        if self.memory_used_bytes is None or not self.memory_total_bytes:
            return None
        return 100 * self.memory_used_bytes / self.memory_total_bytes

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GpuSample:
        """Read what `to_json` of a sample wrote."""
        processes, instances = _all_of(GpuProcess, data, "processes"), _all_of(MigInstance, data, "instances")
        return of_kind(cls, data, processes=processes, instances=instances)


@dataclass(frozen=True, kw_only=True)
class HostSample:
    """The host; memory is what this run may use, within the limits of its control groups."""

    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    cpu_pct: float | None = None
    """Of all cores together, 0 to 100."""
    cores_pct: tuple[float, ...] | None = None
    disk_read_bytes_s: float | None = None
    disk_written_bytes_s: float | None = None
    network_received_bytes_s: float | None = None
    network_sent_bytes_s: float | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    run_disk_total_bytes: int | None = None
    """The file system that the run folder is on."""
    run_disk_free_bytes: int | None = None
    oom_kill_total: int | None = None
    """Processes that the kernel killed for want of memory, in this control group or on the machine."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HostSample:
        """Read what `to_json` of a sample wrote."""
        return of_kind(cls, data)


@dataclass(frozen=True, kw_only=True)
class RankSample:
    """One rank as it says of itself in `ranks/rank_N.json`, and what the node's /proc says of its process."""

    rank: int
    time_s: float
    """When the rank wrote this: one that is old belongs to a process that stands still."""
    attempt: int | None = None
    node: str | None = None
    pid: int | None = None
    device: str | None = None
    gpu_uuid: str | None = None
    step: int | None = None
    steps_total: int | None = None
    """Steps done in this attempt."""
    total_steps: int | None = None
    section: str | None = None
    section_since_s: float | None = None
    sections_s_total: Mapping[str, float] | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    allocator_retries_total: int | None = None
    resident_bytes: int | None = None
    process_state: str | None = None
    """R, S, D, T, Z as in proc(5), or `gone`."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankSample:
        """Read what a rank, or `to_json` of a sample, wrote."""
        return of_kind(cls, data)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Everything read of one node at one moment."""

    time_s: float
    node: str
    host: HostSample
    attempt: int | None = None
    gpus: tuple[GpuSample, ...] = ()
    ranks: tuple[RankSample, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data; null is "not available"."""
        return {"schema_version": SCHEMA_VERSION, **_plain(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sample:
        """Read what `to_json` wrote; values that make no sense are not available.

        Raises:
            ValueError: it is no sample.
        """
        return of_kind(
            cls,
            data,
            host=HostSample.from_json(mapping(data, "host")),
            gpus=tuple(understood(GpuSample.from_json, mappings(data, "gpus"))),
            ranks=tuple(understood(RankSample.from_json, mappings(data, "ranks"))),
        )


def _plain(value: Any) -> Any:
    """Return plain data; `dataclasses.asdict` copies each leaf, which costs more than reading it did."""
    if is_dataclass(value):
        return {name: _plain(item) for name, item in vars(value).items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _all_of(kind: type[Part], data: Mapping[str, Any], name: str) -> tuple[Part, ...] | None:
    """Return the parts of a list that make sense, None where there is no list."""
    parts = understood(lambda part: of_kind(kind, part), mappings(data, name))
    return tuple(parts) if isinstance(data.get(name), list) else None

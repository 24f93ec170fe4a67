"""Conditions of a node's GPUs and host, with the thresholds of the guides (S2-18, S2-19)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainwright.hardware.reading import GIB
from trainwright.job.schema import AlertsSection
from trainwright.watch.alerts.conditions import Condition, above, below
from trainwright.watch.samples import GpuSample, HostSample, Sample

STEADY_S: Final = 60.0
"""Memory and utilisation swing within a step and a save: only a minute of it means something."""
_HARMFUL: Final = {
    "hw_slowdown": "the hardware slows it down",
    "hw_thermal_slowdown": "the hardware slows it down for its heat",
    "sw_thermal_slowdown": "the driver slows it down for its heat",
    "hw_power_brake": "the power supply asks it to slow down",
}


def machine_conditions(sample: Sample, first: Sample, limits: AlertsSection) -> Iterator[Condition]:
    """Yield the conditions of a sample; `first` is the one that counters are compared with."""
    in_use = {rank.gpu_uuid for rank in sample.ranks}
    before = {gpu.index: gpu for gpu in first.gpus}
    for gpu in sample.gpus:
        yield from _gpu(gpu, before.get(gpu.index, gpu), limits)
        if gpu.uuid is not None and gpu.uuid in in_use:
            yield from _load(gpu, limits)
    yield from _host(sample.host, first.host, limits)


def _gpu(gpu: GpuSample, before: GpuSample, limits: AlertsSection) -> Iterator[Condition]:
    subject = f"GPU {gpu.index}"
    yield Condition(
        rule="gpu_lost",
        subject=subject,
        what=f"{subject} is lost: it no longer answers",
        advice=f"look for `Xid` in `dmesg`; `nvidia-smi --gpu-reset -i {gpu.index}`, or restart the machine",
        beyond=gpu.lost,
        back=not gpu.lost,
    )
    if gpu.temperature_c is not None:
        yield above(
            gpu.temperature_c,
            limits.gpu_temperature_max_c,
            margin=3,
            name="temperature_c",
            rule="gpu_temperature",
            subject=subject,
            what=f"{subject} is at {gpu.temperature_c} °C",
            advice="look at its fans and air; it slows itself down when it gets hotter",
        )
    if gpu.memory_pct is not None:
        yield above(
            gpu.memory_pct,
            limits.gpu_memory_max_pct,
            margin=2,
            name="memory_pct",
            rule="gpu_memory_high",
            subject=subject,
            what=f"{subject} has {gpu.memory_pct:.0f} % of its memory in use",
            advice="near to running out: a smaller train.micro_batch_size keeps the global batch",
            for_s=10,
        )
    if gpu.throttle_reasons is not None:
        harmful = [reason for reason in gpu.throttle_reasons if reason in _HARMFUL]
        yield Condition(
            rule="gpu_throttled",
            subject=subject,
            what=f"{subject} runs slower than it can: {', '.join(_HARMFUL[reason] for reason in harmful)}",
            advice="look at its temperature and power; the other ranks wait for it in every step",
            beyond=bool(harmful),
            back=not harmful,
            figures={"reasons": ", ".join(harmful), "sm_clock_mhz": gpu.sm_clock_mhz},
            for_s=10,
        )
    for rule, count, earlier, name in (
        ("gpu_xid", gpu.xid_total, before.xid_total, f"reported Xid {gpu.last_xid}"),
        ("gpu_ecc", gpu.ecc_uncorrected_total, before.ecc_uncorrected_total, "had memory errors it could not correct"),
    ):
        if count is not None and earlier is not None:
            yield Condition(
                rule=rule,
                subject=subject,
                what=f"{subject} {name}",
                advice="look for `Xid` in `dmesg`; should it come again, take the card out of use",
                beyond=count > earlier,
                back=False,
                figures={"count": count - earlier},
            )


def _load(gpu: GpuSample, limits: AlertsSection) -> Iterator[Condition]:
    """Yield what only matters on a GPU that the run uses."""
    subject = f"GPU {gpu.index}"
    if gpu.memory_pct is not None:
        yield below(
            gpu.memory_pct,
            limits.gpu_memory_min_pct,
            margin=2,
            name="memory_pct",
            rule="gpu_memory_low",
            subject=subject,
            what=f"{subject} has {gpu.memory_pct:.0f} % of its memory in use",
            advice="there is room: a larger train.micro_batch_size with fewer accumulation steps is faster",
            for_s=STEADY_S,
            severity="note",
        )
    if gpu.utilization_pct is not None:
        yield below(
            gpu.utilization_pct,
            limits.gpu_utilization_min_pct,
            margin=5,
            name="utilization_pct",
            rule="gpu_utilization_low",
            subject=subject,
            what=f"{subject} is busy {gpu.utilization_pct} % of the time",
            advice="see where its rank waits: data, communication, or a batch too small for the card",
            for_s=STEADY_S,
        )
        yield above(
            gpu.utilization_pct,
            limits.gpu_utilization_max_pct,
            margin=5,
            name="utilization_pct",
            rule="gpu_utilization_high",
            subject=subject,
            what=f"{subject} is busy {gpu.utilization_pct} % of the time",
            advice="nothing is wrong: the card is full",
            for_s=STEADY_S,
            severity="note",
        )


def _host(host: HostSample, before: HostSample, limits: AlertsSection) -> Iterator[Condition]:
    if host.memory_available_bytes is not None:
        available_gib = host.memory_available_bytes / GIB
        yield below(
            available_gib,
            limits.host_available_min_gib,
            margin=0.5,
            name="available_gib",
            rule="host_memory",
            subject="host",
            what=f"the host has {available_gib:.1f} GiB of memory available",
            advice="the kernel kills a process when it has none: end other programs or use a smaller batch",
            for_s=4,
        )
    if host.oom_kill_total is not None and before.oom_kill_total is not None:
        yield Condition(
            rule="host_oom_kill",
            subject="host",
            what="the kernel killed a process for want of host memory",
            advice="`dmesg` names it; use a smaller batch, fewer workers, or ask for more memory",
            beyond=host.oom_kill_total > before.oom_kill_total,
            back=False,
            figures={"count": host.oom_kill_total - before.oom_kill_total},
        )
    if host.shm_free_bytes is not None and host.shm_total_bytes:
        used_pct = 100 - 100 * host.shm_free_bytes / host.shm_total_bytes
        yield above(
            used_pct,
            90,
            margin=5,
            name="used_pct",
            rule="shared_memory",
            subject="/dev/shm",
            what=f"/dev/shm is {used_pct:.0f} % full",
            advice="NCCL and data workers need it: `docker run --shm-size`, or remove what others left there",
        )

"""The time of one optimizer step: computation of each rank, communication, optimizer, offload, put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from trainwright.anatomy import Anatomy
from trainwright.errors import UserError
from trainwright.estimate.cache import Recent
from trainwright.estimate.figures import StepTime
from trainwright.estimate.request import Request
from trainwright.estimate.time.communication import MicroBatchPace, Tensors, exposed_s
from trainwright.estimate.time.compute import NF4_BYTES, PhaseTime, TimedPasses, arithmetic_of
from trainwright.estimate.time.launches import UPDATE_LAUNCH_S, LaunchPace, launch_pace
from trainwright.estimate.time.links import Link, link_of
from trainwright.estimate.time.pass_cache import passes_of, recent_size
from trainwright.estimate.time.rates import RateRange, Speed, speed_of
from trainwright.estimate.time.size import Size
from trainwright.estimate.time.traffic import CAST_BYTES
from trainwright.estimate.time.update import UPDATES, Update, update_s
from trainwright.hardware import catalog
from trainwright.hardware.inventory import Device

_CLIPPING_PASSES: Final = 3
"""Norm of the gradients (read), then their scaling (read and write)."""
# CPU Adam of DeepSpeed: 0.22, 0.51, 1.03, 2.41, 2.57 s for 1, 2, 4, 8, 10 billion parameters (arXiv 2101.06840,
# table 4; one DGX-2 node).
_CPU_ADAM_PARAMETERS_S: Final = RateRange(1.0e9, 4.0e9, 6.0e9)
_SLOW, _USUAL, _FAST = 0, 1, 2
"""Ends of the spreads."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """What one kind of GPU needs: its passes, and seconds of the update."""

    speed: Speed
    launches: LaunchPace
    passes: TimedPasses
    update_s: float


@dataclass(frozen=True, slots=True)
class _Group:
    """Devices that train together: their kinds, whose each one is, how many nodes, and what connects them."""

    kinds: Mapping[str, catalog.GpuSpec]
    keys: tuple[str, ...]
    nodes: int
    link: Link


_groups: Recent[_Group] = Recent()


def why_not(request: Request, devices: tuple[Device, ...]) -> str | None:
    """Why no time can be given, in one line; None where it can."""
    unknown = [device for device in devices if device.catalog_key is None]
    if any(device.kind == "cpu" for device in unknown):
        return "the time of a step on a CPU is not estimated"
    if unknown:
        names = ", ".join(dict.fromkeys(device.name for device in unknown))
        return f"the speed of {names} is not known: it is not in the catalogue of GPUs"
    if sliced := [device for device in devices if device.mig is not None]:
        return f"the speed of a slice of a GPU ({sliced[0].label}) is not known"
    for gpu in {device.catalog_key: _gpu(device) for device in devices}.values():
        if arithmetic_of(request, speed_of(gpu)) not in speed_of(gpu).matmul:
            return f"{gpu.name} has no {request.precision} arithmetic: choose fp16"
    return None


def step_time(
    anatomy: Anatomy,
    request: Request,
    devices: tuple[Device, ...],
    *,
    network_gb_s: float | None = None,
    peer_access: bool = True,
    update: Update | None = None,
) -> StepTime:
    """Estimate one optimizer step with all its micro-batches; one device for each rank, in order over the nodes.

    `network_gb_s` is what a node can send to another, in 10^9 bytes a second (None: assumed). `peer_access` is false
    where GPUs that could reach each other's memory may not (`NCCL_P2P_DISABLE=1`). `update` is what a program's own
    optimizer does, else that of the request counts.

    Raises:
        UserError: no time can be given for these devices (`why_not`).
    """
    assert len(devices) == request.world_size, "one device for each rank"
    if reason := why_not(request, devices):
        raise UserError(f"no time of a step: {reason}")
    group = _groups.of((devices,), (network_gb_s, peer_access), lambda: _grouped(devices, network_gb_s, peer_access))
    size = recent_size(anatomy, request)
    launches = launch_pace(group.kinds.values())
    kinds = {key: _rank(anatomy, request, speed_of(gpu), launches, size, update) for key, gpu in group.kinds.items()}
    tensors = _tensors(anatomy, request, size)
    host_s = _host_s(request, group, size, tensors)
    slow, usual, fast = (
        {key: _Course(request, rank, end) for key, rank in kinds.items()} for end in (_SLOW, _USUAL, _FAST)
    )
    parts = _parts(request, group.link, tensors, host_s, usual.values())
    return StepTime(
        step_s=sum(parts.values()),
        low_s=sum(_parts(request, group.link, tensors, host_s, fast.values()).values()),
        high_s=sum(_parts(request, group.link, tensors, host_s, slow.values()).values()),
        parts_s=parts,
        limit=max(parts, key=lambda part: parts[part]),
        ranks_s=tuple(usual[key].alone_s for key in group.keys),
    )


def _gpu(device: Device) -> catalog.GpuSpec:
    assert device.catalog_key is not None
    return catalog.catalog().gpus[device.catalog_key]


def _grouped(devices: tuple[Device, ...], network_gb_s: float | None, peer_access: bool) -> _Group:
    gpus = [_gpu(device) for device in devices]
    link = link_of(devices, gpus, network_gb_s, peer_access=peer_access)
    nodes = len({device.node for device in devices})
    return _Group({gpu.key: gpu for gpu in gpus}, tuple(gpu.key for gpu in gpus), nodes, link)


class _Course:
    """What one kind of GPU does in a step before it has to wait for others, at one end of the spreads."""

    def __init__(self, request: Request, rank: _Rank, end: int) -> None:
        speed, passes = rank.speed, rank.passes
        products = speed.matmul[arithmetic_of(request, speed)]
        longer = (
            _longer(products, end),
            _longer(speed.flash_forward or products, end),
            _longer(speed.bandwidth, end),
        )
        self.end, self.speed = end, speed
        self.forward, self.recompute, self.backward = (
            _stretched(phase, *longer) for phase in (passes.forward, passes.recompute, passes.backward)
        )
        pace = rank.launches.times((rank.launches.slow, 1.0, rank.launches.fast)[end])
        forward_wait_s = _wait_s(self.forward.seconds, self.forward.launched * pace.forward_s)
        backward_wait_s = _wait_s(
            self.recompute.seconds + self.backward.seconds,
            self.recompute.launched * pace.forward_s + self.backward.launched * pace.backward_s,
        )
        self.waits_s = forward_wait_s + backward_wait_s
        self.forward_s = self.forward.seconds + forward_wait_s
        self.backward_s = self.recompute.seconds + self.backward.seconds + backward_wait_s
        self.update_s = rank.update_s * _longer(speed.bandwidth, end)
        self.alone_s = request.gradient_accumulation_steps * (self.forward_s + self.backward_s) + self.update_s


def _parts(
    request: Request, link: Link, tensors: Tensors, host_s: tuple[float, float, float], kinds: Iterable[_Course]
) -> dict[str, float]:
    """Seconds by part of the rank that takes longest."""
    slowest = max(kinds, key=lambda course: course.alone_s)
    steps, passes = request.gradient_accumulation_steps, (slowest.forward, slowest.recompute, slowest.backward)
    bandwidth = _end(slowest.speed.bandwidth, slowest.end)
    pace = MicroBatchPace(slowest.forward_s, slowest.backward_s, slowest.speed.multiprocessors, bandwidth)
    parts = {
        "matrix products": steps * sum(phase.matmul_s for phase in passes),
        "attention": steps * sum(phase.attention_s for phase in passes),
        "memory-bound kernels": steps * sum(phase.memory_s for phase in passes),
        "kernel launches": steps * slowest.waits_s,
        "optimizer": slowest.update_s,
        "communication": exposed_s(request, link, _end(link.rate, slowest.end), tensors, pace),
        "offload": host_s[slowest.end],
    }
    return {part: seconds for part, seconds in parts.items() if seconds > 0}


def _stretched(phase: PhaseTime, products: float, attention: float, memory: float) -> PhaseTime:
    return replace(
        phase,
        matmul_s=phase.matmul_s * products,
        attention_s=phase.attention_s * attention,
        memory_s=phase.memory_s * memory,
    )


def _longer(rate: RateRange, end: int) -> float:
    return rate.usual / _end(rate, end)


def _wait_s(gpu_s: float, host_s: float) -> float:
    """Seconds in which the GPU waits for the next kernel to be launched."""
    return max(0.0, host_s - gpu_s)


def _end(spread: RateRange, end: int) -> float:
    return (spread.slow, spread.usual, spread.fast)[end]


def _rank(
    anatomy: Anatomy, request: Request, speed: Speed, launches: LaunchPace, size: Size, update: Update | None
) -> _Rank:
    passes = passes_of(anatomy, request, speed)
    width = 4 if request.method.type != "full" or request.base_dtype == "fp32" else 2
    # DeepSpeed and apex (O2) keep 16-bit weights beside fp32 ones: gradients are copied there, updated weights back.
    masters = width == 2 and (request.strategy.startswith("zero") or request.base_dtype == "fp16")
    width = 4 if masters else width
    sharded = request.strategy in ("fsdp2", "fsdp1", "zero1", "zero2", "zero3")
    own = size.trained / (request.world_size if sharded else 1)
    update = update or UPDATES[request.optimizer]
    clipped = _CLIPPING_PASSES * width * own if request.max_grad_norm > 0 else 0.0
    copied = 2 * CAST_BYTES * own if masters else 0.0
    summed = own if request.sync_each_micro_batch else size.trained
    accumulated = 3 * width * summed * (request.gradient_accumulation_steps - 1)
    seconds = (clipped + copied + accumulated) / speed.bandwidth.usual
    if request.offload == "none":
        seconds += update_s(update, anatomy, own, size.tensors, width, speed.bandwidth.usual, UPDATE_LAUNCH_S)
    return _Rank(speed, launches, passes, seconds)


def _tensors(anatomy: Anatomy, request: Request, size: Size) -> Tensors:
    half = 4 if request.precision == "fp32" else 2
    full = request.method.type == "full"
    weights = size.packed * NF4_BYTES + (size.parameters - size.packed) * half
    # FSDP2 of the workers sums gradients in fp32 (MixedPrecisionPolicy's reduce_dtype); DDP sums them as they are.
    in_fp32 = request.strategy == "fsdp2" or not full
    width = 4 if in_fp32 or (request.strategy == "ddp" and request.base_dtype == "fp32") else half
    return Tensors(weights, float(size.trained * width), float(size.trained * half), len(anatomy.layers))


def _host_s(request: Request, group: _Group, size: Size, tensors: Tensors) -> tuple[float, float, float]:
    """Seconds of what passes over PCIe, and of the optimizer on the CPU: slow, usual, fast.

    Gradients go to the host and updated weights come back once a step; parameters that live there come for every pass.
    """
    if request.offload == "none":
        return (0.0, 0.0, 0.0)
    ranks = request.world_size
    over_pcie = (tensors.gradients + tensors.updated) / ranks
    if request.offload == "optimizer+parameters":
        over_pcie += 2 * request.gradient_accumulation_steps * tensors.weights / ranks
    slow, usual, fast = (
        over_pcie / _end(group.link.host, end) + size.trained / group.nodes / _end(_CPU_ADAM_PARAMETERS_S, end)
        for end in (_SLOW, _USUAL, _FAST)
    )
    return slow, usual, fast

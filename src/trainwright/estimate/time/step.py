"""The time of one optimizer step: computation of each rank, communication, optimizer, offload, put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trainwright.anatomy import Anatomy
from trainwright.errors import UserError
from trainwright.estimate.figures import StepTime
from trainwright.estimate.request import Request
from trainwright.estimate.time.communication import Pace, Tensors, exposed_s
from trainwright.estimate.time.compute import NF4_BYTES, Passes, Phase, arithmetic_of
from trainwright.estimate.time.links import Link, link_of
from trainwright.estimate.time.rates import Speed, Spread, speed_of
from trainwright.estimate.time.recent import passes_of, recent_size
from trainwright.estimate.time.size import Size
from trainwright.estimate.time.traffic import CAST_BYTES
from trainwright.estimate.time.update import UPDATES, Update, update_s
from trainwright.hardware import catalog
from trainwright.hardware.inventory import Device

_CLIPPING_PASSES: Final = 3
"""Norm of the gradients (read), then their scaling (read and write)."""
# Starting a kernel from eager PyTorch bounds small models: a BERT layer of 36 kernels takes 433 microseconds for 256
# tokens, its backward pass of 70 another 915 (github.com/mli/transformers-benchmarks, micro_bench.ipynb: 15.2 and 14.6
# TFLOPS at batch 2, 128 tokens); 10.4 for an empty kernel (superbench kernel-launch, wall overhead).
_LAUNCH_S: Final = (12e-6, 13e-6)
# CPU Adam of DeepSpeed: 0.22, 0.51, 1.03, 2.41, 2.57 s for 1, 2, 4, 8, 10 billion parameters (arXiv 2101.06840,
# table 4; one DGX-2 node).
_CPU_ADAM_PARAMETERS_S: Final = Spread(1.0e9, 4.0e9, 6.0e9)
# Of the host: 24 to 30 microseconds on the 16 virtual cores beside an H200 (small models of
# benchmarks/results/gpu_truth_h200.json over their kernels), 8 on a fast core.
_LAUNCH_SPREAD: Final = (0.6, 2.4)


@dataclass(frozen=True, slots=True)
class _Rank:
    """What one kind of GPU needs: its passes, and seconds of the update."""

    speed: Speed
    passes: Passes
    update_s: float


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
    gpus = [_gpu(device) for device in devices]
    link = link_of(devices, gpus, network_gb_s, peer_access=peer_access)
    size = recent_size(anatomy, request)
    kinds = {key: _rank(anatomy, request, speed_of(gpu), size, update) for key, gpu in {g.key: g for g in gpus}.items()}
    tensors = _tensors(anatomy, request, size)
    host_s = _host_s(request, link, size, tensors, devices)
    usual = _Total(request, link, tensors, host_s, kinds, 1)
    parts = usual.parts()
    ranks = {key: usual.alone_s(rank) for key, rank in kinds.items()}
    return StepTime(
        step_s=sum(parts.values()),
        low_s=sum(_Total(request, link, tensors, host_s, kinds, 2).parts().values()),
        high_s=sum(_Total(request, link, tensors, host_s, kinds, 0).parts().values()),
        parts_s=parts,
        limit=max(parts, key=lambda part: parts[part]),
        ranks_s=tuple(ranks[gpu.key] for gpu in gpus),
    )


def _gpu(device: Device) -> catalog.Gpu:
    assert device.catalog_key is not None
    return catalog.catalog().gpus[device.catalog_key]


@dataclass(frozen=True)
class _Total:
    """The step at one end of the spreads: 0 slow, 1 usual, 2 fast."""

    request: Request
    link: Link
    tensors: Tensors
    host_s: tuple[float, float, float]
    kinds: Mapping[str, _Rank]
    end: int

    def parts(self) -> dict[str, float]:
        """Seconds by part of the rank that takes longest."""
        slowest = max(self.kinds.values(), key=self.alone_s)
        steps = self.request.gradient_accumulation_steps
        phases = slowest.passes.forward, slowest.passes.recompute, slowest.passes.backward
        forward, recompute, backward = (self._scaled(slowest, phase) for phase in phases)
        waits = [self._wait_s(phase, phase is backward) for phase in (forward, recompute, backward)]
        pace = Pace(
            _sum(forward) + waits[0],
            _sum(recompute) + _sum(backward) + waits[1] + waits[2],
            slowest.speed.multiprocessors,
            _end(slowest.speed.bandwidth, self.end),
        )
        rate = _end(self.link.rate, self.end)
        parts = {
            "matrix products": steps * (forward.matmul_s + recompute.matmul_s + backward.matmul_s),
            "attention": steps * (forward.attention_s + recompute.attention_s + backward.attention_s),
            "memory-bound kernels": steps * (forward.memory_s + recompute.memory_s + backward.memory_s),
            "kernel launches": steps * sum(waits),
            "optimizer": slowest.update_s * self._factor(slowest.speed.bandwidth),
            "communication": exposed_s(self.request, self.link, rate, self.tensors, pace),
            "offload": self.host_s[self.end],
        }
        return {part: seconds for part, seconds in parts.items() if seconds > 0}

    def alone_s(self, rank: _Rank) -> float:
        """Seconds that this GPU computes in a step before it has to wait for others."""
        passes, steps = rank.passes, self.request.gradient_accumulation_steps
        forward, recompute = (self._scaled(rank, phase) for phase in (passes.forward, passes.recompute))
        backward = self._scaled(rank, passes.backward)
        computed = sum(_sum(phase) + self._wait_s(phase, False) for phase in (forward, recompute))
        computed += _sum(backward) + self._wait_s(backward, True)
        return steps * computed + rank.update_s * self._factor(rank.speed.bandwidth)

    def _scaled(self, rank: _Rank, phase: Phase) -> Phase:
        kind = arithmetic_of(self.request, rank.speed)
        attention = rank.speed.flash_forward or rank.speed.matmul[kind]
        return Phase(
            phase.matmul_s * self._factor(rank.speed.matmul[kind]),
            phase.attention_s * self._factor(attention),
            phase.memory_s * self._factor(rank.speed.bandwidth),
            phase.kernels,
        )

    def _factor(self, spread: Spread) -> float:
        return spread.usual / _end(spread, self.end)

    def _wait_s(self, phase: Phase, backward: bool) -> float:
        """Seconds in which the GPU waits for the next kernel to be launched."""
        slow = (_LAUNCH_SPREAD[1], 1.0, _LAUNCH_SPREAD[0])[self.end]
        return max(0.0, phase.kernels * _LAUNCH_S[backward] * slow - _sum(phase))


def _end(spread: Spread, end: int) -> float:
    return (spread.slow, spread.usual, spread.fast)[end]


def _sum(phase: Phase) -> float:
    return phase.matmul_s + phase.attention_s + phase.memory_s


def _rank(anatomy: Anatomy, request: Request, speed: Speed, size: Size, update: Update | None) -> _Rank:
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
    accumulated = 3 * width * size.trained * (request.gradient_accumulation_steps - 1)
    seconds = (clipped + copied + accumulated) / speed.bandwidth.usual
    if request.offload == "none":
        seconds += update_s(update, anatomy, own, size.tensors, width, speed.bandwidth.usual, _LAUNCH_S[0])
    return _Rank(speed, passes, seconds)


def _tensors(anatomy: Anatomy, request: Request, size: Size) -> Tensors:
    half = 4 if request.precision == "fp32" else 2
    full = request.method.type == "full"
    weights = size.packed * NF4_BYTES + (size.parameters - size.packed) * half
    # FSDP2 of the workers sums gradients in fp32 (MixedPrecisionPolicy's reduce_dtype); DDP sums them as they are.
    in_fp32 = request.strategy == "fsdp2" or not full
    width = 4 if in_fp32 or (request.strategy == "ddp" and request.base_dtype == "fp32") else half
    return Tensors(weights, float(size.trained * width), float(size.trained * half), len(anatomy.layers))


def _host_s(
    request: Request, link: Link, size: Size, tensors: Tensors, devices: tuple[Device, ...]
) -> tuple[float, float, float]:
    """Seconds of what passes over PCIe, and of the optimizer on the CPU: slow, usual, fast.

    Gradients go to the host and updated weights come back once a step; parameters that live there come for every pass.
    """
    if request.offload == "none":
        return (0.0, 0.0, 0.0)
    ranks, nodes = request.world_size, len({device.node for device in devices})
    over_pcie = (tensors.gradients + tensors.updated) / ranks
    if request.offload == "optimizer+parameters":
        over_pcie += 2 * request.gradient_accumulation_steps * tensors.weights / ranks
    slow, usual, fast = (
        over_pcie / _end(link.host, end) + size.trained / nodes / _end(_CPU_ADAM_PARAMETERS_S, end) for end in (0, 1, 2)
    )
    return slow, usual, fast

"""How a model is spread over GPUs to answer questions: one GPU, a replica on each, or layers over several (S3-09..12).

The guide's table (S3-18) goes by the weights alone and puts 7B replicas of 14 GB on cards of 12 GB, which cannot be
(X-09, X-10). Here weights, cache and a pass must fit, and where one card is too small the layers are spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.anatomy import Anatomy
from trainwright.errors import ExitCode, UserError
from trainwright.estimate.inference import cache_bytes, pass_bytes, weight_bytes
from trainwright.estimate.outside import context_bytes
from trainwright.hardware import catalog
from trainwright.hardware.inventory import Device
from trainwright.hardware.reading import GIB
from trainwright.plan.capacity import capacity_of
from trainwright.plan.estimates import MARGIN

GpuMode = Literal["single", "data_parallel", "accelerate", "auto"]


@dataclass(frozen=True, kw_only=True)
class AnswerMode:
    """The mode, how many GPUs hold one copy of the model, how many copies there are, and why.

    `gpu_bytes` is what the fullest GPU needs, an estimate.
    """

    mode: GpuMode
    gpus_per_replica: int
    replicas: int
    gpu_bytes: int
    reason: str


def answer_mode(
    anatomy: Anatomy, devices: tuple[Device, ...], asked: GpuMode = "auto", *, dtype: str, samples: int, length: int
) -> AnswerMode:
    """Return how `devices` answer `samples` questions of `length` tokens at a time with one copy of the model.

    Raises:
        UserError: what was asked for, or the model at all, cannot fit (exit code 3), with the figures.
    """
    room = min(_room(device) for device in devices)
    layers = len(anatomy.layers)
    weights = weight_bytes(anatomy, dtype)
    cache = cache_bytes(anatomy, dtype, samples, length)
    working = pass_bytes(anatomy, dtype, samples, length)
    largest_layer = -(-(weights + cache) // layers)
    whole = weights + cache + working

    def on(count: int) -> int:
        # Whole layers go to a GPU; the fullest has at most one more than its share.
        return whole if count == 1 else (weights + cache) // count + largest_layer + working

    sizes = [count for count in range(1, len(devices) + 1) if on(count) <= room]
    figures = (
        f"weights {weights / GIB:.1f} GiB + cache {cache / GIB:.1f} + a pass {working / GIB:.1f} "
        f"= {whole / GIB:.1f} GiB, and a GPU has room for {room / GIB:.1f}"
    )
    if not sizes:
        raise UserError(
            f"the model does not fit on {len(devices)} x {devices[0].name}: {figures}",
            hints=["more GPUs, or larger ones", "a smaller model", "fewer questions at a time, or shorter ones"],
            exit_code=ExitCode.NO_PLAN_FITS,
        )
    needed = sizes[0]
    if asked in ("single", "data_parallel") and needed > 1:
        raise UserError(
            f"gpu_mode={asked} puts the whole model on one GPU, where it does not fit: {figures}",
            hints=[f"gpu_mode=accelerate spreads its layers over {needed} GPUs", "gpu_mode=auto chooses"],
            exit_code=ExitCode.NO_PLAN_FITS,
        )
    mode = asked if asked != "auto" else _best(needed, len(devices))
    if mode == "accelerate":
        count = len(devices) if needed > len(devices) // 2 or asked == "accelerate" else needed
        return AnswerMode(
            mode=mode,
            gpus_per_replica=count,
            replicas=1,
            gpu_bytes=on(count),
            reason=f"layers over {count} GPUs, as one is too small: {figures}",
        )
    if mode == "single":
        return AnswerMode(mode=mode, gpus_per_replica=1, replicas=1, gpu_bytes=whole, reason=f"fits: {figures}")
    replicas = len(devices) // needed
    return AnswerMode(
        mode=mode, gpus_per_replica=needed, replicas=replicas, gpu_bytes=on(needed), reason=f"a copy on each: {figures}"
    )


def _best(needed: int, count: int) -> GpuMode:
    if needed > 1:
        return "data_parallel" if count // needed > 1 else "accelerate"
    return "single" if count == 1 else "data_parallel"


def _room(device: Device) -> int:
    capacity = capacity_of(device)
    if capacity is None:
        raise UserError(
            f"the memory of {device.label} is not known", hints=["name a GPU of the catalogue: trainwright gpus --gpus"]
        )
    gpu = None if device.catalog_key is None else catalog.catalog().gpus[device.catalog_key]
    return int(capacity.total_bytes * (1 - MARGIN)) - context_bytes(gpu)

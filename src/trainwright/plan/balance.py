"""GPUs of different speed: parts of a step that take each as long as the others, within the memory of each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainwright.anatomy import Anatomy
from trainwright.estimate.figures import StepTime
from trainwright.estimate.request import Request
from trainwright.estimate.time import step_time
from trainwright.hardware.inventory import Device
from trainwright.job.schedule import apportion

Fits = Callable[[Device, int], bool]
"""Whether a GPU holds a micro-batch of so many samples."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Each rank's samples of a global batch, how many of them it takes at once, and the time of such a step."""

    rank_samples: tuple[int, ...]
    rank_micro_batch_sizes: tuple[int, ...]
    gradient_accumulation_steps: int
    step: StepTime


def shares_by_speed(
    anatomy: Anatomy, request: Request, devices: tuple[Device, ...], equal: StepTime, total: int, fits: Fits
) -> Shares | None:
    """Return the shares of `total` samples that suit GPUs which take `equal.ranks_s` for equal parts.

    None where the shares are equal, a GPU would get no sample, or does not hold one.
    """
    samples = apportion(total, [1 / seconds for seconds in equal.ranks_s])
    if len(set(samples)) == 1:
        return None
    most = {_model(device): 0 for device in devices}
    for device, share in zip(devices, samples, strict=True):
        most[_model(device)] = max(most[_model(device)], _largest(device, share, fits))
    at_once = [min(share, most[_model(device)]) for device, share in zip(devices, samples, strict=True)]
    if min(at_once) < 1:
        return None
    steps = max(map(_passes, samples, at_once))
    collective = request.strategy not in ("single", "ddp")
    # Where ranks wait for each other in every pass, each pass has to be shared by speed, not only the step.
    micro = [math.ceil(share / steps) for share in samples] if collective else at_once
    parts = [
        RankShare(share, size, steps if collective else _passes(share, size))
        for share, size in zip(samples, micro, strict=True)
    ]
    return Shares(
        rank_samples=tuple(samples),
        rank_micro_batch_sizes=tuple(micro),
        gradient_accumulation_steps=max(map(_passes, samples, micro)),
        step=_step(anatomy, request, devices, parts),
    )


def best_equal_parts(
    anatomy: Anatomy, request: Request, devices: tuple[Device, ...], equal: StepTime, total: int, fits: Fits
) -> StepTime:
    """Return the shortest step in equal parts: `equal`, or that with the largest micro-batch which every GPU holds."""
    share = math.ceil(total / len(devices))
    at_once = min(_largest(device, share, fits) for device in {_model(device): device for device in devices}.values())
    if at_once <= request.micro_batch_size:
        return equal
    passes = _passes(share, at_once)
    asked = dataclasses.replace(request, micro_batch_size=-(-share // passes), gradient_accumulation_steps=passes)
    return min(equal, step_time(anatomy, asked, devices), key=lambda time: time.step_s)


@dataclass(frozen=True)
class RankShare:
    """A rank's samples of a step, and in how many passes of how many at most it computes them."""

    samples: int
    at_once: int
    passes: int


def _passes(samples: int, at_once: int) -> int:
    return math.ceil(samples / at_once)


def _model(device: Device) -> tuple[str, str, str]:
    return device.name, str(device.memory_total_bytes), str(device.memory_free_bytes)


def _largest(device: Device, most: int, fits: Fits) -> int:
    """Return the largest micro-batch up to `most` that a GPU holds, 0 where it holds none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(device, middle):
            low = middle
        else:
            high = middle - 1
    return low


def _step(anatomy: Anatomy, request: Request, devices: tuple[Device, ...], parts: Sequence[RankShare]) -> StepTime:
    """Return the time of a step in which each rank has a part of its own: that of the slowest."""
    times = {part: _alike(anatomy, request, devices, part) for part in set(parts)}
    ranks_s = tuple(times[part].ranks_s[rank] for rank, part in enumerate(parts))
    # With equal parts the weakest GPU sets the pace: its communication is that of this step.
    weakest = max(range(len(parts)), key=lambda rank: times[parts[0]].ranks_s[rank])
    base = times[parts[weakest]]
    return _longer(base, (base.step_s + max(ranks_s) - ranks_s[weakest]) / base.step_s, ranks_s)


def _alike(anatomy: Anatomy, request: Request, devices: tuple[Device, ...], part: RankShare) -> StepTime:
    """Return the time of a step in which all ranks had this part; passes that are not full take as much less."""
    asked = dataclasses.replace(request, micro_batch_size=part.at_once, gradient_accumulation_steps=part.passes)
    time = step_time(anatomy, asked, devices)
    full = part.samples / (part.at_once * part.passes)
    return _longer(time, full, tuple(seconds * full for seconds in time.ranks_s))


def _longer(time: StepTime, factor: float, ranks_s: tuple[float, ...]) -> StepTime:
    return dataclasses.replace(
        time,
        step_s=time.step_s * factor,
        low_s=time.low_s * factor,
        high_s=time.high_s * factor,
        parts_s={part: seconds * factor for part, seconds in time.parts_s.items()},
        ranks_s=ranks_s,
    )

"""How a model is spread over GPUs to answer questions: one GPU, a replica on each, or layers over several (S3-09..12).

The guide's table (S3-18) goes by the weights alone and puts 7B replicas of 14 GB on cards of 12 GB, which cannot be
(X-09, X-10). Here weights, cache and a pass must fit, and where one card is too small the layers are spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainwright.anatomy import Anatomy
from trainwright.errors import ExitCode, UserError
from trainwright.estimate.inference import cache_bytes, pass_bytes, weight_bytes
from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device
from trainwright.hardware.precision import Precision, choose_precision
from trainwright.hardware.reading import GIB
from trainwright.plan.capacity import room_of

GpuMode = Literal["single", "data_parallel", "accelerate", "auto"]

PROCESS_BYTES = GIB // 2
"""What Python, torch and transformers take of host memory beside the model: 424 MiB were measured, with torch 2.13."""


@dataclass(frozen=True, kw_only=True)
class AnswerMode:
    """The mode, which devices hold each copy of the model, and why.

    `groups` are positions in the devices that were given, one group a copy; on a processor, which holds all copies,
    they are the same. `gpu_bytes` is what the fullest device needs for one copy, an estimate.
    """

    mode: GpuMode
    groups: tuple[tuple[int, ...], ...]
    gpu_bytes: int
    reason: str

    @property
    def gpus_per_replica(self) -> int:
        """Devices that hold one copy."""
        return len(self.groups[0])

    @property
    def replicas(self) -> int:
        """Copies of the model, each answering on its own."""
        return len(self.groups)


def answer_dtype(device: Device, asked: Precision | Literal["auto"] = "auto") -> Choice[Precision]:
    """Return what the model computes in: what was asked for if the device can do it, else what it does best.

    A processor takes fp32 of its own accord, where the same question has the same answer in a batch of any size.
    """
    if device.kind == "cpu":
        return Choice("fp32", "answers do not hang on the batch they are in") if asked == "auto" else Choice(asked, "")
    return choose_precision(device, asked)


def answer_mode(
    anatomy: Anatomy,
    devices: Sequence[Device],
    asked: GpuMode = "auto",
    *,
    dtype: str,
    samples: int,
    length: int,
    gpus_per_replica: int | None = None,
    cpu_replicas: int = 1,
) -> AnswerMode:
    """Return how `devices` answer `samples` questions of `length` tokens at a time with one copy of the model.

    `gpus_per_replica` makes groups of so many GPUs hold a copy each; None: as few as it takes. `cpu_replicas` copies
    share a processor's memory.

    Raises:
        UserError: what was asked for, or the model at all, cannot fit (exit code 3), with the figures.
    """
    size = _Size.of(anatomy, dtype, samples, length)
    if devices[0].kind != "cuda":
        return _on_the_host(size, devices[0], asked, cpu_replicas)
    rooms = [_room(device) for device in devices]
    figures = f"{size}, and a GPU has room for {_span(rooms)} GiB (estimates)"
    if not size.fits(rooms) and not any(size.fits([room]) for room in rooms):
        raise UserError(
            f"the model does not fit on {len(devices)} x {devices[0].name}: {figures}",
            hints=["more GPUs, or larger ones", "a smaller model", *size.shorter(rooms)],
            exit_code=ExitCode.NO_PLAN_FITS,
        )
    if asked == "accelerate":
        everything = tuple(range(len(devices)))
        return _made("accelerate", (everything,), size, f"layers over {_gpus(len(devices))}, as was asked: {figures}")
    alone: list[tuple[int, ...]] = [(number,) for number, room in enumerate(rooms) if size.fits([room])]
    if gpus_per_replica in (None, 1) and alone:
        return _whole_copies(asked, alone, len(devices), size, figures)
    return _divided_copies(asked, rooms, gpus_per_replica, size, figures)


def _divided_copies(
    asked: GpuMode, rooms: list[int], gpus_per_replica: int | None, size: _Size, figures: str
) -> AnswerMode:
    """Return copies that each have their layers over several GPUs."""
    needed, groups = _groups(size, rooms, gpus_per_replica)
    of_one_gpu = gpus_per_replica in (None, 1)
    if asked == "single" or (asked == "data_parallel" and of_one_gpu) or not groups:
        raise UserError(
            f"gpu_mode={asked} puts the whole model on one GPU, where it does not fit: {figures}"
            if of_one_gpu
            else f"the model does not fit on {_gpus(gpus_per_replica or 1)}: {figures}",
            hints=_instead(needed, len(rooms)),
            exit_code=ExitCode.NO_PLAN_FITS,
        )
    count = len(groups[0])
    if len(groups) == 1:
        return _made("accelerate", groups, size, f"layers over {_gpus(count)}, as one is too small: {figures}")
    reason = f"{len(groups)} copies, each with its layers over {_gpus(count)}, as one is too small: {figures}"
    return _made("data_parallel", groups, size, reason)


@dataclass(frozen=True)
class _Size:
    """Bytes of a model that answers, by part; `piece` is the largest that is never divided between two GPUs."""

    weights: int
    cache: int
    working: int
    piece: int

    @staticmethod
    def of(anatomy: Anatomy, dtype: str, samples: int, length: int) -> _Size:
        weights = weight_bytes(anatomy, dtype)
        cache = cache_bytes(anatomy, dtype, samples, length)
        a_layer = -(-(weights + cache) // len(anatomy.layers))
        vocabulary = [w.rows * w.columns for _, w in anatomy.weights() if w.part in ("head", "embedding")]
        matrix = max(vocabulary, default=0) * weights // anatomy.parameter_count
        return _Size(weights, cache, pass_bytes(anatomy, dtype, samples, length), max(a_layer, matrix))

    @property
    def whole(self) -> int:
        return self.weights + self.cache + self.working

    def on(self, count: int) -> int:
        """Of the fullest of `count` equal GPUs: at most one piece more than its share."""
        return self.whole if count == 1 else (self.weights + self.cache) // count + self.piece + self.working

    def fits(self, rooms: Sequence[int]) -> bool:
        if len(rooms) == 1:
            return self.whole <= rooms[0]
        return sum(max(0, room - self.piece - self.working) for room in rooms) >= self.weights + self.cache

    def shorter(self, rooms: Sequence[int]) -> list[str]:
        """The hint that helps where the weights alone would fit."""
        bare = _Size(self.weights, 0, 0, self.piece)
        return ["fewer questions at a time, or shorter ones"] if bare.fits(rooms) else []

    def __str__(self) -> str:
        parts = f"weights {self.weights / GIB:.1f} GiB + cache {self.cache / GIB:.1f} + a pass {self.working / GIB:.1f}"
        return f"{parts} = {self.whole / GIB:.1f} GiB"


def _on_the_host(size: _Size, device: Device, asked: GpuMode, copies: int) -> AnswerMode:
    """A processor, or an Apple GPU, which shares the host's memory and holds one copy."""
    copies = copies if device.kind == "cpu" and asked in ("auto", "data_parallel") else 1
    room = _room(device)
    each = size.whole + PROCESS_BYTES
    figures = (
        f"{size} a copy (+ {PROCESS_BYTES / GIB:.1f} for its process), and {room / GIB:.1f} GiB are free (estimates)"
    )
    if asked == "accelerate":
        raise UserError("gpu_mode=accelerate spreads layers over GPUs, and there are none", hints=["gpu_mode=auto"])
    if copies * each > room:
        most = room // each
        fewer = [f"{most} replicas, which fit" if most > 1 else "one replica, which fits"] if most else []
        raise UserError(
            f"the model does not fit into the host's memory{f' {copies} times' if copies > 1 else ''}: {figures}",
            hints=[*fewer, "dtype=bf16 takes half of fp32", "a smaller model", *size.shorter([room])],
            exit_code=ExitCode.NO_PLAN_FITS,
        )
    if copies == 1:
        return _made("single", ((0,),), size, f"fits: {figures}")
    return _made("data_parallel", ((0,),) * copies, size, f"{copies} copies share the memory: {figures}")


def _whole_copies(asked: GpuMode, alone: list[tuple[int, ...]], devices: int, size: _Size, figures: str) -> AnswerMode:
    """One copy on the first GPU where it fits, or one on each where it does."""
    if asked == "single" or (asked == "auto" and devices == 1):
        return _made("single", (alone[0],), size, f"fits: {figures}")
    left_out = [str(number) for number in range(devices) if (number,) not in alone]
    without = f", but not on {', '.join(left_out)}, where it does not fit" if left_out else ""
    return _made("data_parallel", tuple(alone), size, f"a copy on each{without}: {figures}")


def _groups(size: _Size, rooms: list[int], asked: int | None) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return how many GPUs a copy takes at least, and the neighbours that hold one each.

    As many copies as can be, and then as many GPUs to each: what its weights leave free is room for a larger batch.
    """

    def holding(count: int) -> tuple[tuple[int, ...], ...]:
        chunks = (tuple(range(start, start + count)) for start in range(0, len(rooms) - count + 1, count))
        return tuple(chunk for chunk in chunks if size.fits([rooms[number] for number in chunk]))

    least = next((count for count in range(2, len(rooms) + 1) if holding(count)), len(rooms))
    narrow = holding(least if asked in (None, 1) else asked)
    if not narrow or asked not in (None, 1):
        return least, narrow
    wide = holding(len(rooms) // len(narrow))
    return least, wide if len(wide) == len(narrow) else narrow


def _instead(needed: int, devices: int) -> list[str]:
    groups = [f"gpu_mode=data_parallel gpus_per_replica={needed} makes {devices // needed} groups of {needed} GPUs"]
    return [
        *(groups if devices // needed > 1 else []),
        "gpu_mode=accelerate spreads the layers of one copy over all of them",
        "gpu_mode=auto chooses",
    ]


def _made(mode: GpuMode, groups: tuple[tuple[int, ...], ...], size: _Size, reason: str) -> AnswerMode:
    return AnswerMode(mode=mode, groups=groups, gpu_bytes=size.on(len(groups[0])), reason=reason)


def _gpus(count: int) -> str:
    return f"{count} GPUs" if count > 1 else "one GPU"


def _span(rooms: Sequence[int]) -> str:
    low, high = min(rooms) / GIB, max(rooms) / GIB
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"


def _room(device: Device) -> int:
    room = room_of(device)
    if room is None:
        raise UserError(
            f"the memory of {device.label} is not known", hints=["name a GPU of the catalogue: trainwright gpus --gpus"]
        )
    return room

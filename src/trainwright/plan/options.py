"""All sensible layouts of a Job on some devices: what the job leaves open is tried, what it says is kept."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainwright.hardware.inventory import Device
from trainwright.job.schedule import effective_batch
from trainwright.job.schema import Job

ZERO = ("zero1", "zero2", "zero3")
SIMPLEST_FIRST = ("single", "ddp", "fsdp2", *ZERO)
OFFLOADS = ("none", "optimizer", "optimizer+parameters")
MOST_MICRO_STEPS = 1024
"""Micro-batches of one optimizer step that are still tried; further ones only cost time."""


def lacking() -> tuple[str, ...]:
    """Return the strategies whose library is not installed here."""
    return () if importlib.util.find_spec("deepspeed") is not None else ZERO


@dataclass(frozen=True)
class Sharing:
    """How ranks share the work, and what they keep in host memory."""

    strategy: str
    offload: str


@dataclass(frozen=True)
class BatchSplit:
    """Micro-batch and accumulation of a global batch on some ranks."""

    micro_batch_size: int
    gradient_accumulation_steps: int


def device_sets(devices: Sequence[Device], count: int | None = None) -> list[tuple[Device, ...]]:
    """Return the sets worth comparing: 1, 2, 3, 4, 6, 8, ... of each model, whole nodes, and all devices together.

    With `count`, only sets of that size; devices that differ are mixed only where no model alone has enough.
    """
    kinds: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        kinds.setdefault((device.name, str(device.memory_total_bytes)), []).append(device)
    of_one_model = dict.fromkeys(chosen for alike in kinds.values() for chosen in _sets_of(alike, count))
    if count is None:
        return list(of_one_model | {tuple(devices): None})
    sized = [chosen for chosen in of_one_model if len(chosen) == count]
    return sized or [tuple(devices[:count])]


def _sets_of(alike: Sequence[Device], count: int | None) -> Iterator[tuple[Device, ...]]:
    """Yield the sets of devices of one model: some of the first node, then whole nodes."""
    nodes = sorted({device.node for device in alike})
    on_first = [device for device in alike if device.node == nodes[0]]
    for size in range(1, len(on_first) + 1):
        if size <= 4 or size % 2 == 0 or size in (len(on_first), count):
            yield tuple(on_first[:size])
    for number in range(2, len(nodes) + 1):
        yield tuple(device for device in alike if device.node in nodes[:number])


def sharings(job: Job, ranks: int, kind: str) -> list[Sharing]:
    """Return the strategies and offloads that the job allows on `ranks`, the simplest first."""
    asked, offload = job.resources.strategy, job.resources.offload
    strategies = _unasked(job, ranks) if asked == "auto" else (asked,)
    found = []
    for strategy in strategies:
        offloads = [offload] if offload != "none" or kind != "cuda" or not strategy.startswith("zero") else OFFLOADS
        for kept in offloads:
            pointless = asked == "auto" and strategy == "zero3" and ranks == 1 and kept == "none"
            impossible = kept == "optimizer+parameters" and strategy != "zero3"
            if not (pointless or impossible) and (kept == "none" or _suits(job, "zero3")):
                found.append(Sharing(strategy, kept))
    return found


def _unasked(job: Job, ranks: int) -> list[str]:
    """Return the strategies to try where the job names none."""
    with_offload = {"optimizer": ("zero2", "zero3"), "optimizer+parameters": ("zero3",)}
    without = ("single", "zero3") if ranks == 1 else ("ddp", "fsdp2", "zero2", "zero3")
    return [strategy for strategy in with_offload.get(job.resources.offload, without) if _suits(job, strategy)]


def _suits(job: Job, strategy: str) -> bool:
    """Whether a strategy that nobody asked for trains this job as any other would."""
    if job.train.optim != "adamw":
        return strategy in ("single", "ddp")
    return not (strategy in ZERO and job.method.type == "qlora")


def global_batch(job: Job, given: frozenset[str], ranks: int) -> int:
    """Return the examples of an optimizer step: the job's, or what a given micro-batch and accumulation make of it."""
    train = job.train
    micro, accumulation = train.micro_batch_size, train.gradient_accumulation_steps
    if micro != "auto" and accumulation != "auto" and "train.global_batch_size" not in given:
        return effective_batch(micro, accumulation, ranks)
    return train.global_batch_size


def batches(job: Job, total: int, ranks: int) -> list[BatchSplit]:
    """Return the ways to make a global batch of `total` on `ranks`, the largest micro-batch first."""
    train = job.train
    share = math.ceil(total / ranks)
    if train.micro_batch_size != "auto":
        micro_sizes = [train.micro_batch_size]
    elif train.gradient_accumulation_steps != "auto":
        micro_sizes = [math.ceil(share / train.gradient_accumulation_steps)]
    else:
        micro_sizes = list(_micro_sizes(share))
    found = []
    for micro in micro_sizes:
        steps = math.ceil(total / (micro * ranks))
        accumulation = train.gradient_accumulation_steps
        found.append(BatchSplit(micro, steps if accumulation == "auto" else accumulation))
    return found


def reductions(job: Job, strategy: str, sizes: Sequence[BatchSplit]) -> list[tuple[bool, list[BatchSplit]]]:
    """Return whether gradients are reduced in every micro-batch (True) or once a step, with the batches to try so.

    FSDP2 has the choice, where a step has several micro-batches. A step of a single one carries no gradients, and so
    may fit where several smaller ones do not. What a script of the user's own does is its matter: accelerate reduces
    once a step, unless it is told `sync_each_batch`.
    """
    if strategy != "fsdp2":
        return [(False, list(sizes))]
    asked = job.train.sync_each_micro_batch
    choices = (False, True) if asked == "auto" else (asked,)
    if asked == "auto" and job.script is not None:
        choices = (False,)
    several = [size for size in sizes if size.gradient_accumulation_steps > 1]
    alone = [size for size in sizes if size not in several]
    return [(each, tried) for each, tried in ((False, alone), *((each, several) for each in choices)) if tried]


def _micro_sizes(share: int) -> Iterator[int]:
    """Sizes that divide a rank's share evenly, and where those are far apart, halves rounded up."""
    sizes = {share // steps for steps in range(1, min(share, MOST_MICRO_STEPS) + 1) if share % steps == 0}
    half = share
    while half > 1:
        sizes.add(half)
        half = math.ceil(half / 2)
    yield from sorted(sizes | {1}, reverse=True)

"""Layouts of a job whose step is not estimated: one is a plan only where what it must hold at least is known to fit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.anatomy.weight_shapes import ModelShapes
from trainwright.errors import ExitCode, UserError
from trainwright.estimate.least import least_bytes, least_host_bytes
from trainwright.hardware import catalog
from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device, Host
from trainwright.hardware.reading import GIB, NotAvailable
from trainwright.job.schema import Job
from trainwright.plan.by_rule import Choices, layout_by_rule
from trainwright.plan.capacity import room_of
from trainwright.plan.estimates import request_of
from trainwright.plan.job_model import NoEstimate
from trainwright.plan.layout import Layout
from trainwright.plan.options import OFFLOADS, Sharing, sharings
from trainwright.plan.reasons import devices_text, sharing_text
from trainwright.plan.requirements import ranks_of


@dataclass(frozen=True, kw_only=True)
class Least:
    """What a device must hold at least, in bytes by part, and the room that it has for that.

    On a CPU it is that of all ranks together. `source` is where the model's parameters were read; `why_not` says why
    it does not fit, None where it does.
    """

    parts_bytes: dict[str, int]
    room_bytes: int
    source: str
    host_bytes: int = 0
    """What offloading keeps in a node's host memory at least; whether that is there may not be known."""
    why_not: str | None = None

    @property
    def total_bytes(self) -> int:
        """Of all parts."""
        return sum(self.parts_bytes.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in self.parts_bytes.items())
        host = f", and at least {self.host_bytes / GIB:.1f} GiB of each node's host memory" if self.host_bytes else ""
        sizes = f"at least {_gib(self.total_bytes)} GiB ({parts}); {self.room_bytes / GIB:.1f} GiB available"
        return sizes + host

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data; every figure in it is an estimate."""
        return dataclasses.asdict(self) | {"total_bytes": self.total_bytes}


@dataclass(frozen=True, kw_only=True)
class Unestimated:
    """A layout by rule with its reasons and why its step is not estimated; `least` is None where that is not known."""

    layout: Layout
    choices: Choices
    why_no_estimate: str
    least: Least | None = None

    @property
    def fits(self) -> bool:
        """Whether what it must hold is known to fit."""
        return self.least is not None and self.least.why_not is None


class _NotKnownError(Exception):
    """Something is not known that can be brought."""

    def __init__(self, missing: UserError) -> None:
        super().__init__(missing.message)
        self.missing = missing


def by_rule(
    job: Job,
    given: frozenset[str],
    devices: tuple[Device, ...],
    host: Host,
    model: NoEstimate,
    *,
    must_fit: bool,
    keep: Layout | None,
    lacks: Sequence[str],
) -> list[Unestimated]:
    """Return the layouts by rule that hold what they must, the simplest first, or `keep` where it is among them.

    Where none does, or nothing is known, one is returned all the same, unless it `must_fit`. The strategies that
    `lacks` names are taken only where nothing else holds the model.

    Raises:
        UserError: it must fit, and does not (exit code 3), or something that can be brought is not known (exit code
            4); or the job contradicts itself or the devices.
    """
    if model.shapes is None:
        if must_fit and model.missing is not None and job.script is None:
            raise model.missing
        return [_of_unknown_size(job, given, devices, model.reason)]
    try:
        found = _layouts(job, given, devices, host, model)
    except _NotKnownError as error:
        if must_fit:
            raise error.missing from None
        return [_of_unknown_size(job, given, devices, error.missing.message)]
    kept = [one for one in found if one.layout == keep]
    usable = kept or _with_libraries([one for one in found if one.fits], lacks)
    if usable:
        return usable
    if must_fit:
        raise _nothing_fits(job, given, devices, host, model, found)
    return [min(_with_libraries(found, lacks), key=lambda one: 0 if one.least is None else one.least.total_bytes)]


def _with_libraries(layouts: list[Unestimated], lacks: Sequence[str]) -> list[Unestimated]:
    """Return the layouts whose strategy has its library; all of them where none has."""
    return [one for one in layouts if one.layout.strategy not in lacks] or layouts


def _of_unknown_size(job: Job, given: frozenset[str], devices: tuple[Device, ...], why: str) -> Unestimated:
    layout, choices = layout_by_rule(job, given, devices, why)
    return Unestimated(layout=layout, choices=choices, why_no_estimate=why)


def _layouts(
    job: Job, given: frozenset[str], devices: tuple[Device, ...], host: Host, model: NoEstimate
) -> list[Unestimated]:
    """Return a layout by rule for each way to share a model of known size, the simplest first, offload last."""
    least_room, most_room = _rooms(devices, host)
    found = list(_in_room(job, given, devices, host, model, most_room))
    if least_room == most_room or not any(one.fits for one in found):
        return found
    found = list(_in_room(job, given, devices, host, model, least_room))
    if not any(one.fits for one in found):
        raise _NotKnownError(_no_memory(devices[0]))
    return found


def _in_room(
    job: Job, given: frozenset[str], devices: tuple[Device, ...], host: Host, model: NoEstimate, room: int
) -> Iterator[Unestimated]:
    shapes, config = model.shapes, model.config
    assert shapes is not None and config is not None
    for sharing in _ways(job, ranks_of(job, devices).value, devices[0].kind):
        layout, choices = layout_by_rule(job, given, devices, model.reason, sharing)
        least = _least(job, layout, devices, host, config, shapes, room)
        if job.resources.strategy == "auto":
            choices["resources.strategy"] = Choice(sharing.strategy, least.why_not or f"{least}")
        yield Unestimated(layout=layout, choices=choices, why_no_estimate=model.reason, least=least)


def _nothing_fits(
    job: Job,
    given: frozenset[str],
    devices: tuple[Device, ...],
    host: Host,
    model: NoEstimate,
    found: Sequence[Unestimated],
) -> UserError:
    """Return the error (exit code 3) for devices on which no layout fits, with the methods that need less."""
    hints = []
    for method, words in (("lora", "LoRA instead of all weights"), ("qlora", "QLoRA (4-bit base)")):
        if job.method.type in (method, "qlora") or job.model.from_scratch is not None:
            continue
        changed = job.model_copy(update={"method": job.method.model_copy(update={"type": method, "freeze": []})})
        try:
            tried = _layouts(changed, given, devices, host, model)
        except (UserError, _NotKnownError):  # the change contradicts something else in the job, or needs more
            continue
        holds = [one.least for one in tried if one.fits]
        if holds:
            hints.append(f"{words} may fit: it needs {holds[0]}  (method.type={method})")
    return UserError(
        "no layout fits on these devices: weights, gradients and optimizer states alone need more (estimates)",
        problems=[
            f"{devices_text(devices)}, {sharing_text(one.layout)}: {one.least.why_not}"
            for one in found
            if one.least is not None
        ],
        hints=[*hints, "a smaller model, or more or larger devices"],
        exit_code=ExitCode.NO_PLAN_FITS,
    )


def _ways(job: Job, ranks: int, kind: str) -> list[Sharing]:
    if kind != "cuda" and job.resources.strategy == "auto" and job.resources.offload == "none":
        return [Sharing("single", "none")] if ranks == 1 else [Sharing(name, "none") for name in ("ddp", "fsdp2")]
    return sorted(sharings(job, ranks, kind), key=lambda sharing: OFFLOADS.index(sharing.offload))


def _least(
    job: Job,
    layout: Layout,
    devices: tuple[Device, ...],
    host: Host,
    config: dict[str, Any],
    shapes: ModelShapes,
    room: int,
) -> Least:
    # What must be held is the same on every kind of device; a request for the CPU refuses what only CUDA can compute.
    request = request_of(job, config, dataclasses.replace(layout, device="cuda"), devices)
    parts = least_bytes(shapes, request)
    if parts is None:
        raise _NotKnownError(
            UserError(
                f"{shapes.source} says how many parameters there are; method.type={job.method.type} needs their shapes",
                hints=[
                    "put the model's *.safetensors beside its config.json",
                    "or install torch and transformers here",
                ],
                exit_code=ExitCode.MISSING,
            )
        )
    together = layout.ranks if layout.device == "cpu" else 1
    least = Least(
        parts_bytes={part: together * size for part, size in parts.items()}, room_bytes=room, source=shapes.source
    )
    if least.total_bytes > room:
        return dataclasses.replace(least, why_not=f"needs {least}")
    if layout.offload == "none":
        return least
    on_node = max(Counter(device.node for device in devices).values()) * least_host_bytes(shapes, request)
    available, free_gib = _host_bytes(host), job.resources.host_memory_free_gib
    if available is None or on_node <= available - free_gib * GIB:
        return dataclasses.replace(least, host_bytes=on_node)
    return dataclasses.replace(
        least,
        host_bytes=on_node,
        why_not=f"needs at least {on_node / GIB:.1f} GiB of each node's host memory; {available / GIB:.1f} GiB "
        f"available, of which {free_gib:g} stay free",
    )


def _gib(size_bytes: int) -> str:
    size = size_bytes / GIB
    return f"{size:.1f}" if size >= 0.1 else f"{size:.2g}"


def _rooms(devices: Sequence[Device], host: Host) -> tuple[int, int]:
    """Return the room of the device that has the least: what it is sure to have, and what it may have at most.

    The two differ for an Apple machine that is written down without its memory.
    """
    rooms = [_rooms_of(device, host) for device in devices]
    return min(least for least, _ in rooms), min(most for _, most in rooms)


def _rooms_of(device: Device, host: Host) -> tuple[int, int]:
    known = device.memory_total_bytes
    if device.kind == "mps" and isinstance(known, NotAvailable):
        known = host.memory_total_bytes  # which it shares
    sizes = [known] if not isinstance(known, NotAvailable) else [size * GIB for size in _sold_with(device)]
    rooms = [room_of(dataclasses.replace(device, memory_total_bytes=size)) for size in sizes] or [room_of(device)]
    found = [room for room in rooms if room is not None]
    if not found:
        raise _NotKnownError(_no_memory(device))
    return min(found), max(found)


def _sold_with(device: Device) -> tuple[int, ...]:
    """Return the sizes of memory, in GiB, that an Apple machine is sold with."""
    key = device.catalog_key
    return () if key is None else catalog.catalog().gpus[key].memory_options_gib


def _no_memory(device: Device) -> UserError:
    sizes = _sold_with(device)
    sold = f"; it is sold with {', '.join(map(str, sizes))} GiB" if sizes else ""
    hints = [f"say how much it has: --gpus {device.catalog_key}-{size}gb" for size in sizes[-1:]]
    return UserError(
        f"the memory of {device.name} is not known{sold}",
        hints=hints or ["name a GPU of the catalogue: trainwright gpus --gpus"],
        exit_code=ExitCode.MISSING,
    )


def _host_bytes(host: Host) -> int | None:
    for found in (host.memory_available_bytes, host.memory_total_bytes):
        if not isinstance(found, NotAvailable):
            return found
    return None

"""Which kind of out of memory on a device: by the figures in its message, the stack, and how far the run came."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from trainwright.doctor.scan import Scan, Sighting
from trainwright.launch.hangs.stacks import StackFrame
from trainwright.out_of_memory import ALLOCATOR_VARIABLES, fragmentation_advice

_GIB: Final = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}
_OTHERS: Final = re.compile(r"Process (?P<pid>\d+) has (?P<size>[\d.]+) (?P<unit>\w+) memory in use")
_OWN: Final = re.compile(r"this process has (?P<size>[\d.]+) (?P<unit>\w+) memory in use")
_TOTAL: Final = re.compile(r"total capacity of (?P<size>[\d.]+) (?P<unit>\w+)")
_EVALUATING: Final = re.compile(r"evaluat|validation|prediction_step|predict|_evaluate|nested_concat", re.IGNORECASE)
_SAVING: Final = re.compile(r"_save|save_|consolidated|get_state_dict|full_tensor|gather_state")
_LOADING: Final = re.compile(r"load_state_dict|from_pretrained|load_optimizer|load_checkpoint|_load_")
OTHERS_SHARE: Final = 0.2
"""Of the card's memory that others must hold before they are the cause; a desktop holds a few percent."""


@dataclass(frozen=True)
class DeviceMemory:
    """The kind as a cause's id, and what else there is to say."""

    cause: str
    said: str
    pids: tuple[int, ...] = ()


def kind_of(sighting: Sighting, scan: Scan, message: str) -> DeviceMemory:
    """Return the kind; `message` is the whole of what was said, over all of its lines."""
    others = [(int(found["pid"]), _gib(found)) for found in _OTHERS.finditer(message)]
    total, own = _TOTAL.search(message), _OWN.search(message)
    held = sum(size for _, size in others)
    if total and others and held >= OTHERS_SHARE * _gib(total) and (own is None or held > 0.25 * _gib(own)):
        return DeviceMemory(
            "device-oom/other-process",
            f"{len(others)} other processes hold {held:.1f} of {_gib(total):.1f} GiB",
            tuple(pid for pid, _ in others),
        )
    environment = {ALLOCATOR_VARIABLES[1]: scan.facts.get("expandable", "none")}
    if fragmentation_advice(message, environment) is not None:
        return DeviceMemory("device-oom/fragmentation", "what is reserved and unused would have sufficed")
    doing = _doing(sighting.frames, message)
    if doing is not None:
        return DeviceMemory(f"device-oom/{doing}", f"the stack is in {doing}")
    steps = max(scan.step or 0, sighting.losses_before)
    if steps > 2:
        return DeviceMemory("device-oom/later", f"{steps:,} steps had passed")
    return DeviceMemory("device-oom/at-once", "no step had passed")


def _doing(frames: tuple[StackFrame, ...], message: str) -> str | None:
    if own := re.search(r"out of memory in (evaluation|saving)\b", message):
        return own[1]
    kinds = (("saving", _SAVING), ("evaluation", _EVALUATING), ("loading", _LOADING))
    named = (name for frame in reversed(frames) for name, pattern in kinds if pattern.search(frame.function))
    return next(named, None)


def _gib(found: re.Match[str]) -> float:
    return float(found["size"]) * _GIB.get(found["unit"], 1.0)

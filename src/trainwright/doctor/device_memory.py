"""Which kind of out of memory on a device: by the figures in its message, the stack, and how far the run came."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trainwright.doctor.scan import Scan, Sighting
from trainwright.launch.hangs.stacks import StackFrame
from trainwright.out_of_memory import ALLOCATOR_VARIABLES, fragmentation_advice, held_bytes

_GIB: Final = {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0}
_OTHERS: Final = re.compile(r"Process (?P<pid>\d+) has (?P<size>[\d.]+) (?P<unit>\w+) memory in use")
_OWN: Final = re.compile(r"this process has (?P<size>[\d.]+) (?P<unit>\w+) memory in use")
_TOTAL: Final = re.compile(r"total capacity of (?P<size>[\d.]+) (?P<unit>\w+)")
_FREE: Final = re.compile(r"(?P<size>[\d.]+) (?P<unit>\w+)(?: is)? free")
_OLD_TOTAL: Final = re.compile(r"(?P<size>[\d.]+) (?P<unit>\w+) total capacity")
_OLD_OWN: Final = re.compile(r"(?P<size>[\d.]+) (?P<unit>\w+) reserved in total by PyTorch")
_EVALUATING: Final = re.compile(r"evaluat|validation|prediction_step|predict|_evaluate|nested_concat", re.IGNORECASE)
_SAVING: Final = re.compile(
    r"_save|save_|^save$|consolidated|get_state_dict|full_tensor|gather_state|^state_dict$|(?<!load_)state_dict_hook"
)
_LOADING: Final = re.compile(
    r"load_state_dict|from_pretrained|load_optimizer|load_checkpoint|_load_|^load$|load_model|restore_location|deserialize"
)
CONTEXT_GIB: Final = 4.0
"""What a process holds beside its allocator at most: context, kernels, communicators."""
OTHERS_SHARE: Final = 0.2
"""Of the card's memory that others must hold before they are the cause; a desktop holds a few percent."""


@dataclass(frozen=True)
class DeviceMemory:
    """The kind as a cause's id, and what else there is to say."""

    cause: str
    said: str
    pids: tuple[int, ...] = ()


def kind_of(sighting: Sighting, scan: Scan, message: str, listed: Sequence[tuple[int, float]] = ()) -> DeviceMemory:
    """Return the kind; `message` is the whole of what was said, over all of its lines.

    `listed` are processes with their GiB in a list of nvidia-smi's that lies beside the log.
    """
    if (held := _held_by_others(message)) is not None:
        return held
    environment = {ALLOCATOR_VARIABLES[1]: scan.facts.get("expandable", "none")}
    if fragmentation_advice(message, environment) is not None:
        return DeviceMemory("device-oom/fragmentation", "what is reserved and unused would have sufficed")
    doing = _doing(sighting.frames, message)
    if doing is not None:
        return DeviceMemory(f"device-oom/{doing}", f"the stack is in {doing}")
    steps = max(scan.step or 0, sighting.losses_before)
    if (unseen := _unseen_gib(message)) is not None:
        return _of_others(f"{unseen:.1f} GiB of the card are neither free nor this process's", ())
    if steps <= 2 and listed:
        return _of_others("nvidia-smi lists processes on the card", listed)
    if steps > 2:
        return DeviceMemory("device-oom/later", f"{steps:,} steps had passed")
    return DeviceMemory("device-oom/at-once", "no step had passed")


def _held_by_others(message: str) -> DeviceMemory | None:
    """Return that the message itself names other processes, and that these hold enough to be the cause."""
    total, own = _TOTAL.search(message), _OWN.search(message)
    others = [(int(other["pid"]), _gib(other)) for other in _OTHERS.finditer(message)]
    if own is None and (reserved := held_bytes(message)) is not None:
        # In a container torch does not know itself in the driver's list: then one of the processes is its own.
        others = [one for one in others if not 0 <= one[1] - sum(reserved) / 2**30 < CONTEXT_GIB]
    if not total or not others:
        return None
    held = sum(size for _, size in others)
    if held < OTHERS_SHARE * _gib(total) or (own is not None and held <= 0.25 * _gib(own)):
        return None
    return _of_others(f"{len(others)} other processes hold {held:.1f} of {_gib(total):.1f} GiB", others)


def _of_others(said: str, processes: Sequence[tuple[int, float]]) -> DeviceMemory:
    return DeviceMemory("device-oom/other-process", said, tuple(pid for pid, _ in processes))


def _unseen_gib(message: str) -> float | None:
    """Return the memory of the card that is neither free nor this process's; None where that is little, or not told."""
    total = _TOTAL.search(message) or _OLD_TOTAL.search(message)
    own, free = _OWN.search(message) or _OLD_OWN.search(message), _FREE.search(message)
    if total is None or own is None or free is None:
        return None
    unseen = _gib(total) - _gib(own) - _gib(free)
    return unseen if unseen >= max(OTHERS_SHARE * _gib(total), CONTEXT_GIB / 2) else None


def _doing(frames: tuple[StackFrame, ...], message: str) -> str | None:
    if own := re.search(r"out of memory in (evaluation|saving)\b", message):
        return own[1]
    kinds = (("saving", _SAVING), ("evaluation", _EVALUATING), ("loading", _LOADING))
    named = (name for frame in reversed(frames) for name, pattern in kinds if pattern.search(frame.function))
    return next(named, None)


def _gib(size: re.Match[str]) -> float:
    return float(size["size"]) * _GIB.get(size["unit"], 1.0)

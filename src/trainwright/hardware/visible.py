"""CUDA_VISIBLE_DEVICES as CUDA reads it: which GPUs a process sees and in what order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class VisibleGpu:
    """What CUDA's numbering depends on: one GPU's UUID and those of its MIG instances, None when MIG is off."""

    uuid: str
    mig_uuids: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Visible:
    """The UUIDs that a process sees, in the order of the CUDA ordinals, and those that the variable allows.

    The two differ by MIG: of all that is allowed CUDA takes one instance. `notes` say what was cut off and why.
    """

    uuids: tuple[str, ...]
    allowed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def visible_devices(gpus: Sequence[VisibleGpu], value: str | None) -> Visible:
    """Apply CUDA_VISIBLE_DEVICES (None: not set) to the GPUs of a machine, given in PCI order.

    Rules: CUDA C++ Programming Guide, "CUDA Environment Variables" (an invalid entry hides itself and all that follow;
    UUIDs may be shortened to a unique prefix), as torch.cuda reads them (a repeated device hides all); MIG User Guide,
    "CUDA Device Enumeration" (one MIG instance a process, and no other GPU beside it).
    """
    if value is None:
        return _one_mig_instance(gpus, [name for gpu in gpus for name in _names(gpu)])
    if not value.strip():
        return Visible((), notes=("CUDA_VISIBLE_DEVICES is empty: CUDA sees no GPU",))
    seen: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        uuid = (_by_uuid if value.lstrip().startswith(("GPU-", "MIG-")) else _by_number)(gpus, entry)
        if uuid is None:
            why = "is the end of the list" if entry == "-1" else "names no GPU here"
            cut = (f"CUDA_VISIBLE_DEVICES={value}: `{entry}` {why}, and CUDA stops reading there",)
            rest = _one_mig_instance(gpus, seen)
            return replace(rest, notes=cut + rest.notes)
        if uuid in seen:
            twice = f"CUDA_VISIBLE_DEVICES={value}: `{entry}` is there twice, and CUDA then sees no GPU"
            return Visible((), notes=(twice,))
        seen.append(uuid)
    return _one_mig_instance(gpus, seen)


def _names(gpu: VisibleGpu) -> tuple[str, ...]:
    return (gpu.uuid,) if gpu.mig_uuids is None else gpu.mig_uuids


def _by_number(gpus: Sequence[VisibleGpu], entry: str) -> str | None:
    # strtol, as CUDA and torch.cuda read it: `1abc` is 1, `abc` is no number.
    number = re.match(r"\+?(\d+)", entry)
    if number is None or int(number[1]) >= len(gpus):
        return None
    return next(iter(_names(gpus[int(number[1])])), None)


def _by_uuid(gpus: Sequence[VisibleGpu], entry: str) -> str | None:
    """Return the GPU or MIG instance of a UUID, or of the beginning of one."""
    if entry.startswith("GPU-"):
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        return next(iter(_names(matches[0])), None) if len(matches) == 1 else None
    instances = [name for gpu in gpus for name in gpu.mig_uuids or () if entry.startswith("MIG-")]
    matching = [name for name in instances if name == entry] or [name for name in instances if name.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _one_mig_instance(gpus: Sequence[VisibleGpu], seen: list[str]) -> Visible:
    instances = {name for gpu in gpus for name in gpu.mig_uuids or ()}
    chosen = next((name for name in seen if name in instances), None)
    if chosen is None or len(seen) == 1:
        return Visible(tuple(seen), tuple(seen))
    note = f"CUDA uses one MIG instance a process and no other GPU beside it: of {len(seen)} it sees only {chosen}"
    return Visible((chosen,), tuple(seen), (note,))

"""The closed form of memory: what a rank's GPU holds at the highest point of a step, without torch.

The highest point is one of a few: for each the bytes are `fixed + samples * each`. They are found once for a model and
a way of training it by passing a short model, one layer of each kind, through autograd's own bookkeeping (`tape`), and
continued to the full depth (`memory_timeline`). Then a layout costs a few multiplications.
"""

from __future__ import annotations

from dataclasses import replace

from trainwright.anatomy.parts import Anatomy
from trainwright.estimate.closed.layouts import Layouts
from trainwright.estimate.cuda_overhead import outside_bytes
from trainwright.estimate.figures import Memory
from trainwright.estimate.request import Request
from trainwright.hardware.catalog import GpuSpec

__all__ = ["memory", "replayed"]

_RECENT = 8
_models: dict[int, Layouts] = {}


def memory(anatomy: Anatomy, request: Request, gpu: GpuSpec | None = None) -> Memory:
    """The peak memory of one rank; `request.config` is not read, `gpu` says what lies outside torch's allocator.

    Raises:
        UserError: the model's family has no closed form, or `method.targets` match nothing.
    """
    outside = outside_bytes(request, gpu)
    found = _layouts_of(anatomy).peak(request)
    return Memory(
        allocated_bytes=found.allocated_bytes,
        reserved_bytes=found.reserved_bytes,
        device_bytes=found.reserved_bytes + sum(outside.values()),
        parts_bytes=found.parts_bytes,
        outside_bytes=outside,
        peak=found.where,
        evaluation_bytes=found.evaluation_bytes,
    )


def replayed(anatomy: Anatomy, request: Request, gpu: GpuSpec | None = None) -> Memory:
    """The same, with what the caching allocator comes to when every piece of two whole steps passes through it.

    It takes some tenths of a second for a model of 7 B, whatever its micro-batch.

    Raises:
        UserError: as `memory`.
    """
    quick = memory(anatomy, request, gpu)
    found = _layouts_of(anatomy).reserved(request)
    requested = quick.allocated_bytes - quick.parts_bytes.get("rounding", 0)
    allocated = max(requested, found.allocated_bytes)
    reserved = max(allocated, found.step_bytes)
    parts = dict(quick.parts_bytes) | {"rounding": allocated - requested}
    return replace(
        quick,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=reserved + sum(quick.outside_bytes.values()),
        parts_bytes={part: size for part, size in parts.items() if size},
        evaluation_reserved_bytes=found.evaluation_bytes,
    )


def _layouts_of(anatomy: Anatomy) -> Layouts:
    """What is known of a model already; hashing an anatomy takes longer than the answer, so it goes by identity."""
    found = _models.get(id(anatomy))
    if found is None:
        while len(_models) >= _RECENT:
            _models.pop(next(iter(_models)))
        found = _models[id(anatomy)] = Layouts(anatomy)
    return found

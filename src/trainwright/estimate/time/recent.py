"""What was worked out for other layouts of the same model: passes do not depend on how ranks share the work.

Anatomies and methods are known by identity, as hashing one takes longer than an answer; entries hold on to them, so
that an identity never comes to mean something else.
"""

from __future__ import annotations

from trainwright.anatomy import Anatomy
from trainwright.estimate.request import Request
from trainwright.estimate.time.compute import Passes, micro_batch
from trainwright.estimate.time.rates import Speed
from trainwright.estimate.time.size import Size, size_of

_MOST = 4096
_passes: dict[tuple[object, ...], tuple[Passes, object]] = {}
_sizes: dict[tuple[object, ...], tuple[Size, object]] = {}


def passes_of(anatomy: Anatomy, request: Request, speed: Speed) -> Passes:
    """Return the passes over one micro-batch."""
    key = (
        id(anatomy),
        id(request.method),
        id(speed),
        request.micro_batch_size,
        request.sequence_length,
        request.target_length,
        request.gradient_checkpointing,
        request.attention,
        request.precision,
        request.autocast,
        request.base_dtype,
        request.recipe,
        request.tf32,
        request.separate_experts,
        tuple(request.fused_kernels),
        request.strategy in ("single", "ddp"),
    )
    found = _passes.get(key)
    if found is None:
        if len(_passes) >= _MOST:
            _passes.clear()
        found = _passes[key] = micro_batch(anatomy, request, speed), (anatomy, request.method, speed)
    return found[0]


def recent_size(anatomy: Anatomy, request: Request) -> Size:
    """Return how many parameters there are, are trained, and are packed."""
    key = (id(anatomy), id(request.method), request.separate_experts)
    found = _sizes.get(key)
    if found is None:
        if len(_sizes) >= _MOST:
            _sizes.clear()
        found = _sizes[key] = size_of(anatomy, request), (anatomy, request.method)
    return found[0]

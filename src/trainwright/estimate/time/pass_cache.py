"""Passes over a micro-batch and sizes of a model, worked out once for all the ways that ranks may share the work."""

from __future__ import annotations

from trainwright.anatomy import Anatomy
from trainwright.estimate.cache import Recent
from trainwright.estimate.request import Request
from trainwright.estimate.time.compute import TimedPasses, micro_batch
from trainwright.estimate.time.rates import Speed
from trainwright.estimate.time.size import Size, size_of

_passes: Recent[TimedPasses] = Recent()
_sizes: Recent[Size] = Recent()


def passes_of(anatomy: Anatomy, request: Request, speed: Speed) -> TimedPasses:
    """Return the passes over one micro-batch."""
    key = (
        request.micro_batch_size,
        request.sequence_length,
        request.target_length,
        request.gradient_checkpointing,
        request.attention,
        request.seen_batch,
        request.precision,
        request.autocast,
        request.base_dtype,
        request.recipe,
        request.tf32,
        request.separate_experts,
        tuple(request.fused_kernels),
        request.strategy in ("single", "ddp"),
    )
    return _passes.of((anatomy, request.method, speed), key, lambda: micro_batch(anatomy, request, speed))


def recent_size(anatomy: Anatomy, request: Request) -> Size:
    """Return how many parameters there are, are trained, and are packed."""
    return _sizes.of((anatomy, request.method), request.separate_experts, lambda: size_of(anatomy, request))

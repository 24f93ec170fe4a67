"""What a rank holds besides what a micro-step makes: weights, moments, workspaces, gradients carried on."""

from __future__ import annotations

from math import prod

from trainwright.anatomy.parameters import segment_parameters
from trainwright.anatomy.parts import Anatomy
from trainwright.anatomy.quantized import nf4_bytes
from trainwright.estimate.closed import zero
from trainwright.estimate.closed.parameter_memory import (
    BYTES,
    Held,
    Parameters,
    buffer_bytes,
    elements,
    moment_pieces,
    rounding_bytes,
    sharded,
    trained_bytes,
    update_pieces,
    weight_bytes,
)
from trainwright.estimate.request import Request

MIB = 1 << 20


def held(anatomy: Anatomy, request: Request, found: Parameters) -> Held:
    """Bytes by part, all the time and in the parts of a step."""
    kinds = {id(layer.operations): layer for layer in anatomy.layers}
    there = lasting(request, found, largest_layer=max(map(segment_parameters, kinds.values())))
    if not request.strategy.startswith("zero"):
        there.static["weights"] += buffer_bytes(anatomy)
    there.static["workspaces"] = 2 * workspace_bytes(request.compute_capability)
    return there


def lasting(request: Request, found: Parameters, *, largest_layer: int) -> Held:
    """The same of parameters alone, whatever computes with them; ZeRO-3 gathers up to `largest_layer` numbers ahead."""
    if request.strategy.startswith("zero"):
        return zero.held(request, found, sum(map(nf4_bytes, found.packed)), largest_layer)
    return _held_by_torch(request, found)


def workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Of each of the two cuBLAS handles: aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`."""
    return 32 * MIB if compute_capability[0] == 9 else (2 * 4096 + 8 * 16) << 10


def _held_by_torch(request: Request, whole: Parameters) -> Held:
    element = trained_bytes(request)
    found = sharded(whole, request.world_size) if request.strategy == "fsdp2" else whole
    static = weight_bytes(found, request)
    moments = moment_pieces(found.trained, element, request.optimizer)
    static["optimizer"] = sum(moments)
    gradients = element * elements(found.trained)
    update = {"gradients": gradients, "temporaries": sum(update_pieces(found.trained, element, request.optimizer))}
    passing = {}
    if request.strategy == "ddp":
        static["gradients"] = gradients  # the buckets, in which the workers' gradients lie
        if request.recipe == "trainwright":
            del update["gradients"]
    if request.gradient_accumulation_steps > 1:
        # FSDP2 keeps whole gradients in the dtype of the reduction until the last micro-batch, or shards of them.
        carried = 4 if request.strategy == "fsdp2" else element
        passing["gradients"] = carried * elements((found if request.sync_each_micro_batch else whole).trained)
    own = [element * prod(shape) for shape in found.trained]
    base = [BYTES[request.base_dtype] * prod(shape) for shape in found.frozen]
    static["rounding"] = rounding_bytes([*base, *own, *moments])
    if "gradients" in update:
        update["rounding"] = rounding_bytes(own)
    return Held(static, passing, update)

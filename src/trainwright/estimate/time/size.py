"""How many parameters a model has, how many are trained or packed in 4 bits; layers of one kind counted once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from trainwright.anatomy.adapters import Lora, adapters
from trainwright.anatomy.parameters import segment_parameters, trainable_parameters
from trainwright.anatomy.parts import Anatomy, ModuleWeight, Segment
from trainwright.estimate.request import Method, Request


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers of parameters: all, those that are trained, and those that lie packed in 4 bits."""

    parameters: int
    trained: int
    packed: int
    tensors: int
    """Number of tensors that are trained."""


def lora_of(method: Method) -> Lora | None:
    """The adapters that a method asks for, in the anatomy's words."""
    if method.type == "full":
        return None
    targets = [method.targets] if isinstance(method.targets, str) else method.targets
    return Lora(method.r, "all-linear" if targets == ["all-linear"] else targets)


def layer_kinds(anatomy: Anatomy) -> list[list[Segment]]:
    """The layers, those with the same operations together, in the order of their first."""
    kinds: dict[int, list[Segment]] = {}
    for segment in anatomy.layers:
        kinds.setdefault(id(segment.operations), []).append(segment)
    return list(kinds.values())


def shortened(anatomy: Anatomy, layers: Iterable[Segment]) -> Anatomy:
    """The same model with only these of its layers."""
    kept = {id(segment) for segment in layers}
    return replace(anatomy, segments=tuple(s for s in anatomy.segments if not s.is_layer or id(s) in kept))


def is_packed(weight: ModuleWeight, request: Request) -> bool:
    """Whether a matrix of a layer lies in 4 bits: linears do, experts where each is a linear of its own."""
    if request.method.type != "qlora" or not weight.is_matmul or weight.part == "head":
        return False
    return weight.kind in ("linear", "conv1d") or (weight.kind == "experts" and request.separate_experts)


def size_of(anatomy: Anatomy, request: Request) -> Size:
    """Count the parameters of the model, and of what the request trains and packs."""
    method = request.method
    kinds = layer_kinds(anatomy)
    short = shortened(anatomy, (found[0] for found in kinds))
    times = {segment.prefix: len(found) for found in kinds for segment in found[:1]}
    total = sum(times.get(s.prefix, 1) * segment_parameters(s) for s in short.segments)
    tensors = sum(times.get(s.prefix, 1) * _tensors(s) for s in short.segments)
    if method.freeze:
        left = trainable_parameters(anatomy, method.freeze)
        return Size(total, sum(map(prod, left.values())), 0, len(left))
    lora = lora_of(method)
    if lora is None:
        return Size(total, total, 0, tensors)

    def often(path: str) -> int:
        return next((count for prefix, count in times.items() if path.startswith(f"{prefix}.")), 1)

    found = adapters(short, lora)
    trained = sum(often(path) * adapter.parameter_count for path, adapter in found.items())
    packed = sum(
        times.get(segment.prefix, 1) * operation.rows * operation.columns * operation.copies
        for segment in short.segments
        for operation in segment.operations
        if isinstance(operation, ModuleWeight) and is_packed(operation, request)
    )
    return Size(total, trained, packed, 2 * sum(map(often, found)))


def _tensors(segment: Segment) -> int:
    return sum(1 for o in segment.operations if isinstance(o, ModuleWeight) for _ in o.parameters(""))

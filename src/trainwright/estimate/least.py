"""What a rank must hold at the least: weights, gradients and optimizer states, whatever the model computes."""

from __future__ import annotations

import fnmatch

from trainwright.anatomy.weight_shapes import ModelShapes, Shape
from trainwright.estimate.closed.parameter_memory import Parameters
from trainwright.estimate.closed.static_memory import lasting
from trainwright.estimate.offload import offloaded_bytes
from trainwright.estimate.request import Request

PARTS = ("weights", "adapters", "gradients", "optimizer")


def least_bytes(shapes: ModelShapes, request: Request) -> dict[str, int] | None:
    """Return the bytes of a rank by part, None where the method needs shapes that are not known.

    Activations, temporaries, communication buffers and the CUDA context come on top. Formulas are those of the closed
    form (`estimate.closed.held`, `estimate.closed.zero`).
    """
    found = _parameters(shapes, request)
    if found is None:
        return None
    there = lasting(request, found, largest_layer=0)
    sizes = {
        part: there.static.get(part, 0) + max(there.passing.get(part, 0), there.update.get(part, 0)) for part in PARTS
    }
    return {part: size for part, size in sizes.items() if size}


def least_host_bytes(shapes: ModelShapes, request: Request) -> int:
    """Return what a rank keeps in host memory by offloading, in bytes; of shapes for which `least_bytes` is known."""
    found = _parameters(shapes, request)
    assert found is not None
    return sum(offloaded_bytes(request, found.trained, found.frozen).values())


def _parameters(shapes: ModelShapes, request: Request) -> Parameters | None:
    method, named = request.method, shapes.parameters
    if method.type == "full":
        if method.freeze and shapes.linear is None:
            return None
        frozen = {name for pattern in method.freeze for name in fnmatch.filter(named, pattern)}
        trained = tuple(shape for name, shape in named.items() if name not in frozen)
        return _made(tuple(named[name] for name in frozen), (), trained)
    if shapes.linear is None:
        # Adapters are small beside the base, and so may be left out of what is needed at least; packing is not.
        return None if method.type == "qlora" else _made(tuple(named.values()), (), ())
    adapters: list[Shape] = []
    for name in sorted(shapes.linear):
        if _has_adapter(name.removesuffix(".weight"), method.targets):
            rows, columns = named[name]
            adapters += [(method.r, columns), (rows, method.r)]
    packed = shapes.linear if method.type == "qlora" else frozenset()
    sizes = tuple(named[name][0] * named[name][1] for name in sorted(packed))
    return _made(tuple(shape for name, shape in named.items() if name not in packed), sizes, tuple(adapters))


def _has_adapter(path: str, targets: str | list[str]) -> bool:
    """Whether peft puts an adapter on a matrix; of a pattern in one string nothing is counted."""
    if isinstance(targets, str):
        return targets == "all-linear"
    return any(path == target or path.endswith(f".{target}") for target in targets)


def _made(frozen: tuple[Shape, ...], packed: tuple[int, ...], trained: tuple[Shape, ...]) -> Parameters:
    return Parameters(frozen, packed, trained or ((0,),), {}, {}, frozenset())

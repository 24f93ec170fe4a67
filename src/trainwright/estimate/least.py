"""What a rank must hold at the least: weights, gradients and optimizer states, whatever the model computes."""

from __future__ import annotations

import fnmatch

from trainwright.anatomy.weight_shapes import ModelShapes, Shape
from trainwright.estimate.closed.parameter_memory import Parameters
from trainwright.estimate.closed.static_memory import lasting
from trainwright.estimate.offload import offloaded_bytes
from trainwright.estimate.request import Method, Request

PARTS = ("weights", "adapters", "gradients", "optimizer")


def least_bytes(shapes: ModelShapes, request: Request) -> dict[str, int] | None:
    """Return the bytes of a rank by part, None where the method needs shapes that are not known.

    Activations, temporaries, communication buffers and the CUDA context come on top. Formulas are those of the closed
    form (`estimate.closed.held`, `estimate.closed.zero`).
    """
    parameters = _parameters(shapes, request)
    if parameters is None:
        return None
    held = lasting(request, parameters, largest_layer=0)
    sizes = {
        part: held.static.get(part, 0) + max(held.passing.get(part, 0), held.update.get(part, 0)) for part in PARTS
    }
    return {part: size for part, size in sizes.items() if size}


def least_host_bytes(shapes: ModelShapes, request: Request) -> int:
    """Return what a rank keeps in host memory by offloading, in bytes; of shapes for which `least_bytes` is known."""
    parameters = _parameters(shapes, request)
    assert parameters is not None
    return sum(offloaded_bytes(request, parameters.trained, parameters.frozen).values())


def _parameters(shapes: ModelShapes, request: Request) -> Parameters | None:
    method = request.method
    if method.type == "full":
        return None if method.freeze and shapes.linear is None else _without_adapters(shapes, method)
    if shapes.linear is not None:
        return _with_adapters(shapes, shapes.linear, method)
    # Adapters are small beside the base, and so may be left out of what is needed at least; packing is not.
    return None if method.type == "qlora" else _made(tuple(shapes.parameters.values()), (), ())


def _without_adapters(shapes: ModelShapes, method: Method) -> Parameters:
    named = shapes.parameters
    frozen = {name for pattern in method.freeze for name in fnmatch.filter(named, pattern)}
    trained = tuple(shape for name, shape in named.items() if name not in frozen)
    return _made(tuple(named[name] for name in frozen), (), trained)


def _with_adapters(shapes: ModelShapes, linear: frozenset[str], method: Method) -> Parameters:
    named = shapes.parameters
    adapters: list[Shape] = []
    for name in sorted(linear):
        if _has_adapter(name.removesuffix(".weight"), method.targets):
            rows, columns = named[name]
            adapters += [(method.r, columns), (rows, method.r)]
    packed = linear if method.type == "qlora" else frozenset()
    sizes = tuple(named[name][0] * named[name][1] for name in sorted(packed))
    return _made(tuple(shape for name, shape in named.items() if name not in packed), sizes, tuple(adapters))


def _has_adapter(path: str, targets: str | list[str]) -> bool:
    """Whether peft puts an adapter on a matrix; of a pattern in one string nothing is counted."""
    if isinstance(targets, str):
        return targets == "all-linear"
    return any(path == target or path.endswith(f".{target}") for target in targets)


def _made(frozen: tuple[Shape, ...], packed: tuple[int, ...], trained: tuple[Shape, ...]) -> Parameters:
    return Parameters(frozen, packed, trained or ((0,),), {}, {}, frozenset())

"""What a rank holds all the time, and what the optimizer's step takes: weights, adapters, gradients, moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from trainwright.anatomy.adapters import Adapter, Lora, adapters
from trainwright.anatomy.parameters import trainable_parameters
from trainwright.anatomy.parts import Anatomy
from trainwright.anatomy.quantized import nf4_bytes, quantized_matrices
from trainwright.estimate.allocator import (
    MIN_BLOCK_BYTES,
    OWN_SEGMENT_REQUEST_BYTES,
    OWN_SEGMENT_ROUNDING_BYTES,
    SMALL_REQUEST_BYTES,
)
from trainwright.estimate.request import Request

BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "uint8": 1}
SMALLEST_QUANTIZED = 4096
MOMENT_BLOCK = 256
"""bitsandbytes/optim/optimizer.py: smaller parameters keep fp32 moments; a scale for each block of an 8-bit one."""

STEP_COUNTER = 4
"""Bytes: torch's fused AdamW counts its steps on the GPU, a number for each parameter."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameters:
    """All parameters of a model with its method applied, by shape."""

    frozen: tuple[Shape, ...]
    packed: tuple[int, ...]
    """Numbers of weights of each matrix packed in 4 bits."""
    trained: tuple[Shape, ...]
    adapted: Mapping[str, Adapter]
    packed_paths: Mapping[str, int]
    trained_names: frozenset[str]
    """Of the model's own parameters."""
    kept_fp32: int = 0
    """Numbers of frozen weights that stay fp32 where the rest is fp16 (`_keep_in_fp32_modules`)."""
    ranks: int = 1
    """That share each packed matrix; their scales are on every one."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds all the time, while a micro-batch passes, and in the optimizer's step, in bytes by part."""

    static: dict[str, int]
    passing: dict[str, int]
    update: dict[str, int]


def parameters(anatomy: Anatomy, request: Request) -> Parameters:
    """Return what is trained, what is frozen and what is packed."""
    method = request.method
    shapes = anatomy.parameters()
    if method.type == "full":
        trained = trainable_parameters(anatomy, method.freeze) if method.freeze else shapes
        frozen = tuple(shape for name, shape in shapes.items() if name not in trained)
        return Parameters(frozen, (), tuple(trained.values()), {}, {}, frozenset(trained))
    targets = method.targets if method.targets == "all-linear" else list(method.targets)
    adapted = adapters(anatomy, Lora(method.r, targets))  # type: ignore[arg-type]
    packed = quantized_matrices(anatomy) if method.type == "qlora" else {}
    frozen = tuple(shape for name, shape in shapes.items() if name.removesuffix(".weight") not in packed)
    pairs: list[Shape] = []
    for adapter in adapted.values():
        pairs += [(adapter.copies * adapter.rank, adapter.columns), (adapter.rows, adapter.copies * adapter.rank)]
    kept = keeps_fp32(anatomy, request)
    kept_fp32 = sum(prod(w.weight_shape()) for path, w in anatomy.weights() if kept and path.endswith(kept))
    return Parameters(frozen, tuple(packed.values()), tuple(pairs), adapted, packed, frozenset(), kept_fp32)


def keeps_fp32(anatomy: Anatomy, request: Request) -> tuple[str, ...]:
    """Endings of the modules that loading leaves in fp32: of fp16 models, packed or not, never of bf16 ones.

    transformers/modeling_utils.py (`_get_dtype_plan`).
    """
    loaded_lower = request.method.type != "full" and request.base_dtype == "fp16"
    return anatomy.family.kept_in_fp32 if loaded_lower else ()


def sharded(found: Parameters, ranks: int) -> Parameters:
    """One rank's rows of each parameter, as FSDP2 cuts them: padded, so that all ranks hold as much."""

    def rows(shape: Shape) -> Shape:
        return (-(-shape[0] // ranks), *shape[1:])

    return replace(found, frozen=tuple(map(rows, found.frozen)), trained=tuple(map(rows, found.trained)), ranks=ranks)


def weight_bytes(found: Parameters, request: Request) -> dict[str, int]:
    """Bytes of the weights and adapters of one process that holds all of them."""
    method = request.method
    if method.type == "full":
        return {"weights": (elements(found.trained) + elements(found.frozen)) * BYTES[request.base_dtype]}
    frozen = 4 if method.upcast_frozen != "none" else BYTES[request.base_dtype]
    kept = (4 - frozen) * found.kept_fp32
    packed = sum(nf4_bytes(n) - n // 2 + -(-(n // 2) // found.ranks) for n in found.packed)
    return {
        "weights": elements(found.frozen) * frozen + kept + packed,
        "adapters": elements(found.trained) * adapter_bytes(request),
    }


def buffer_bytes(anatomy: Anatomy) -> int:
    """Buffers of a size worth counting: GPT-BigCode keeps a causal mask of its longest input."""
    if not anatomy.family.position_mask_buffer:
        return 0
    places = next(weight for path, weight in anatomy.weights() if path.endswith("wpe"))
    return places.rows**2


def adapter_bytes(request: Request) -> int:
    """Bytes of one number of an adapter."""
    return 4 if request.method.adapter_dtype == "fp32" else BYTES[request.base_dtype]


def trained_bytes(request: Request) -> int:
    """Bytes of one number that is trained."""
    return BYTES[request.base_dtype] if request.method.type == "full" else adapter_bytes(request)


def moment_pieces(shapes: Iterable[Shape], element: int, optimizer: str) -> list[int]:
    """Bytes of each tensor of an optimizer's states over these parameters, in the order in which it makes them.

    Matrices come first, as they decay and are a group of their own; torch's fused AdamW counts its steps on the GPU.
    """
    pieces: list[int] = []
    for shape in sorted(shapes, key=lambda shape: len(shape) < 2):
        size = prod(shape)
        if optimizer == "adafactor":
            of_rows, of_columns = 4 * prod(shape[:-1]), 4 * prod(shape[:-2]) * shape[-1]
            pieces += [of_rows, of_columns] if len(shape) >= 2 else [4 * size]
        elif optimizer == "adamw_8bit":
            blocks = -(-size // MOMENT_BLOCK)
            pieces += [size, size, 4 * blocks, 4 * blocks] if size >= SMALLEST_QUANTIZED else [4 * size] * 2
        else:
            pieces += [STEP_COUNTER] * (optimizer == "adamw") + [element * size] * 2
    return pieces


def update_pieces(shapes: Sequence[Shape], element: int, optimizer: str) -> list[int]:
    """Temporaries of the optimizer's step at their highest (torch/optim/adamw.py, transformers/optimization.py)."""
    matrices, others = [prod(s) for s in shapes if len(s) >= 2], [prod(s) for s in shapes if len(s) < 2]
    if optimizer == "adamw_foreach":
        return [element * size for size in max(matrices, others, key=sum)]
    if optimizer not in ("adamw_loop", "adafactor") or not shapes:
        return []
    # One parameter after the other; what was made for the one before goes when its name is bound again.
    wide = element if optimizer == "adamw_loop" else 4
    copied = 8 if optimizer == "adafactor" and element != 4 else 0  # weight and gradient in fp32
    pairs = pairwise([0, *matrices, *others])
    return max(([wide * before, copied * size, wide * size, wide * size] for before, size in pairs), key=sum)


def rounding_bytes(sizes_bytes: Iterable[int]) -> int:
    """What the caching allocator adds to tensors that are there all the time (`trainwright.estimate.allocator`).

    Blocks are multiples of 512 bytes. Tensors of 10 MiB and more get segments of their own, multiples of 2 MiB, of
    which a rest of up to 1 MiB is not split off.
    """
    total = 0
    for size in sizes_bytes:
        rounded = -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        if size >= OWN_SEGMENT_REQUEST_BYTES:
            segment = -(-size // OWN_SEGMENT_ROUNDING_BYTES) * OWN_SEGMENT_ROUNDING_BYTES
            rounded = segment if segment - rounded <= SMALL_REQUEST_BYTES else rounded
        total += rounded - size
    return total


def elements(shapes: Iterable[Shape]) -> int:
    """Numbers in all of these."""
    return sum(prod(shape) for shape in shapes)

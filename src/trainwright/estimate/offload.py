"""What DeepSpeed keeps in host memory for one rank: buffers of the optimizer and of parameters, as 0.19.8 makes them.

Sources: `deepspeed/runtime/zero/stage_1_and_2.py` (`__init__`, `initialize_optimizer_states`,
`async_accumulate_grad_in_cpu_via_gpu`), `stage3.py` (`_create_fp16_sub_groups`, `_create_fp32_partitions`,
`initialize_optimizer_states`, `_setup_for_real_optimizer`) and `partition_parameters.py` (`partition_param`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Final

from trainwright.estimate.request import Request

Shape = tuple[int, ...]

SUB_GROUP_PARAMETERS: Final = 1_000_000_000
"""Elements of a rank that stage 3 updates together (`sub_group_size`, `deepspeed/runtime/zero/config.py`)."""
_MASTER: Final = 4
_MOMENTS: Final = 8
DTYPE_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}


def offloaded_bytes(request: Request, trained: Sequence[Shape], frozen: Sequence[Shape]) -> dict[str, int]:
    """Bytes that one rank keeps in host memory, by part; empty without offload. AdamW, as the others refuse ZeRO."""
    if request.offload == "none":
        return {}
    made = _stage_3(request, trained, frozen) if request.strategy == "zero3" else _stages_1_and_2(request, trained)
    parts: Counter[str] = Counter()
    for part, size_bytes, pinned in made:
        parts[part] += pinned_bytes(size_bytes) if pinned and request.device == "cuda" else size_bytes
    return dict(parts)


def pinned_bytes(size_bytes: int) -> int:
    """What torch takes for a page-locked block: the next power of two (`ATen/core/CachingHostAllocator.h`)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


Buffers = Iterator[tuple[str, int, bool]]
"""Part, bytes, and whether it is page-locked."""


def _stages_1_and_2(request: Request, trained: Sequence[Shape]) -> Buffers:
    element, ranks = DTYPE_BYTES[request.precision], request.world_size
    for group in _groups(trained):
        own = -(-sum(group) // ranks)
        yield "offloaded optimizer", _MASTER * own, True
        yield "offloaded optimizer", element * own, True  # the updated weights on their way to the GPU
        yield "offloaded optimizer", _MOMENTS * own, False
        yield "offloaded gradients", _MASTER * own, True
        if request.gradient_accumulation_steps > 1:
            yield from (("offloaded gradients", element * size, True) for size in _touched(group, own, ranks))
    yield "offloaded gradients", element * max(map(prod, trained)), True


def _stage_3(request: Request, trained: Sequence[Shape], frozen: Sequence[Shape]) -> Buffers:
    element, ranks = DTYPE_BYTES[request.precision], request.world_size
    groups = [[-(-size // ranks) for size in group] for group in _groups(trained)]
    for group in groups:
        for sub_group in _sub_groups(group):
            yield "offloaded optimizer", (_MASTER + _MOMENTS) * sub_group, False
            yield "offloaded gradients", _MASTER * sub_group, True
    yield "offloaded gradients", element * sum(map(sum, groups)), True
    if request.offload == "optimizer+parameters":
        for group in groups:
            yield "offloaded parameters", element * sum(group), True
        # Each parameter gets a block of its own first; those of trained ones are then copied into the groups above,
        # and torch keeps what was page-locked once.
        kept = trained if request.device == "cuda" else ()
        yield from (("offloaded parameters", element * -(-prod(s) // ranks), True) for s in (*kept, *frozen))


def _groups(trained: Iterable[Shape]) -> list[list[int]]:
    """Sizes of the optimizer's two groups: matrices decay, biases and norms do not."""
    groups: dict[bool, list[int]] = {True: [], False: []}
    for shape in trained:
        groups[len(shape) >= 2].append(prod(shape))
    return [group for group in groups.values() if group]


def _touched(group: Sequence[int], own: int, ranks: int) -> list[int]:
    """Sizes of the parameters that lie in one rank's part, whole or not: of the rank that has the most."""
    ends = list(accumulate(group))
    parts = [
        [size for size, end in zip(group, ends, strict=True) if end > own * rank and end - size < own * (rank + 1)]
        for rank in range(ranks)
    ]
    return max(parts, key=sum)


def _sub_groups(group: Sequence[int]) -> list[int]:
    if sum(group) <= SUB_GROUP_PARAMETERS:
        return [sum(group)]
    made = [0]
    for size in group:
        if made[-1] >= SUB_GROUP_PARAMETERS:
            made.append(0)
        made[-1] += size
    return made

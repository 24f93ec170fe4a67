"""Where torch works in place only if no tensor subclass or dispatch mode is there, as under a tracker there always is.

torch/csrc/autograd/input_buffer.cpp (`accumulate`) adds up gradients of a tensor that is used twice in the first of
them if it holds the only reference: else every sum would make a new tensor that a real run does not make (T5: +4.5 % of
the peak). The tracker repeats the engine's own test. The others ask `areAnyTensorSubclassLike`: the gradients of
indexing and gathering (torch/csrc/autograd/FunctionsManual.cpp, `index_backward`; aten TensorAdvancedIndexing.cpp,
`gather_backward`), and the mask that is added to scores (native/transformers/attention.cpp,
`_scaled_dot_product_attention_math`). Seen in the allocator's history on a GPU (tests/estimate/histories).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ADD = aten.add.Tensor
_IN_PLACE_BACKWARD = {
    aten.index_put.default: aten.index_put_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
}
_math_attention = 0


class References(NamedTuple):
    """Reference counts that a dispatch mode sees when the engine holds the only reference."""

    tensor: int
    storage: int


def in_backward() -> bool:
    """Whether the engine is at work in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_engine_sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether this call may be the engine's sum of two gradients."""
    return func is ADD and not kwargs and len(args) == 2 and in_backward() and not torch.is_grad_enabled()


def in_place(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the operator that a real run calls instead, which writes to its first argument; None if this one."""
    if func is ADD:
        scores, mask = args[0], args[1]
        return aten.add_.Tensor if _math_attention and isinstance(mask, torch.Tensor) and scores.dim() == 4 else None
    if func not in _IN_PLACE_BACKWARD or not in_backward() or torch.is_grad_enabled():
        return None
    accumulates = func is aten.scatter_add.default or (len(args) > 3 and args[3])
    return _IN_PLACE_BACKWARD[func] if accumulates else None


@contextmanager
def math_attention() -> Iterator[None]:
    """Attention that adds its mask to the scores meanwhile."""
    global _math_attention
    _math_attention += 1
    try:
        yield
    finally:
        _math_attention -= 1


def references(tensor: torch.Tensor) -> References:
    """Return the reference counts of a tensor and its storage, with those of the caller."""
    return References(tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


@functools.cache
def sole_owner() -> References:
    """Return the counts that stand for "held by the engine alone" on this torch, found by a small backward pass."""
    seen: list[References] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            if is_engine_sum(func, args, kwargs):
                a, _ = args
                seen.append(references(a))
            return func(*args, **(kwargs or {}))

    with Watch():
        x, weight = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
        hidden = x * 2
        ((hidden @ weight) + (hidden @ weight)).sum().backward()
    assert seen, "the engine added no gradients"
    return seen[-1]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor covers its memory without gaps or overlaps, as the engine asks before adding in place."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True

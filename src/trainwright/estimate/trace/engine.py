"""How the autograd engine adds up gradients of a tensor that is used twice.

torch/csrc/autograd/input_buffer.cpp (`accumulate`) adds in place if it holds the only reference to the first gradient
and no tensor subclass or dispatch mode is there. Under a tracker a mode is always there, so every sum would make a new
tensor that a real run does not make (T5: +4.5 % of the peak). The tracker repeats the engine's own test.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ADD = torch.ops.aten.add.Tensor


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

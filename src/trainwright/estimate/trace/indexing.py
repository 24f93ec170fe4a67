"""Indexing as an earlier torch did it: a slice of all there is was an operator too, with a backward pass of its own.

That pass makes a tensor as large as the one that was indexed: `logits[..., :-1, :]` came to two of them. torch 2.4 does
so, torch 2.11 skips such a slice (torch/csrc/autograd/python_variable_indexing.cpp, `applySlicing`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_slices(asked: bool) -> Iterator[None]:
    """Let indexing by numbers and slices make every slice, while asked for."""
    if not asked:
        yield
        return
    torch.Tensor.__getitem__ = _every_slice  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.Tensor.__getitem__


def _every_slice(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is ... or type(item) in (int, slice) for item in items):
        return torch._C.TensorBase.__getitem__(tensor, index)
    dim, found = 0, tensor
    for item in items:
        if item is ...:
            dim += tensor.dim() - sum(type(other) in (int, slice) for other in items)
        elif type(item) is int:
            found = found.select(dim, item)
        else:
            found = found.unsqueeze(dim) if item is None else _slice(found, dim, item)
            dim += 1
    return found


def _slice(tensor: torch.Tensor, dim: int, item: slice) -> torch.Tensor:
    start = 0 if item.start is None else int(item.start)
    stop = sys.maxsize if item.stop is None else int(item.stop)
    step = 1 if item.step is None else int(item.step)
    found: torch.Tensor = torch.ops.aten.slice.Tensor(tensor, dim, start, stop, step)
    return found

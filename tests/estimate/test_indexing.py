"""Indexing as torch 2.4 did it: the same values, by more operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.estimate.trace.indexing import full_slices

BOUND = st.none() | st.integers(-6, 6)
ITEM = st.builds(slice, BOUND, BOUND, st.sampled_from([None, 1, 2])) | st.integers(-2, 1) | st.none()


class Slices(TorchDispatchMode):
    """Remembers along which dimensions was sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            self.dims.append(args[1] if len(args) > 1 else 0)
        return func(*args, **(kwargs or {}))


def sliced(index: Any, *, asked: bool) -> list[int]:
    numbers = torch.zeros(2, 5, 7)
    with full_slices(asked), Slices() as seen:
        numbers[index]
    return seen.dims


@pytest.mark.parametrize(
    ("index", "dims"),
    [
        ((slice(None), slice(0, None), slice(None)), [0, 1, 2]),
        ((..., slice(None, -1), slice(None)), [1, 2]),
        ((slice(None), None, slice(None)), [0, 2]),
        ((slice(None), -1), [0]),
        ((..., slice(1, None)), [2]),
    ],
)
def test_every_slice_is_an_operator_as_in_torch_2_4(index: Any, dims: list[int]) -> None:
    """What torch 2.4.1 recorded of the same expressions."""
    assert sliced(index, asked=True) == dims
    assert len(sliced(index, asked=False)) <= 1, "torch skips what slices nothing off"


@given(st.lists(ITEM, max_size=3), st.booleans(), st.integers(0, 3))
def test_values_are_those_of_plain_indexing(items: list[Any], with_ellipsis: bool, place: int) -> None:
    index = tuple(items[:place] + [...] * with_ellipsis + items[place:])
    numbers = torch.arange(3 * 4 * 5).reshape(3, 4, 5)
    plain = numbers[index]
    with full_slices(True):
        found = numbers[index]
    assert torch.equal(found, plain)


def test_indices_and_masks_are_left_to_torch() -> None:
    numbers = torch.arange(6).reshape(2, 3)
    with full_slices(True):
        assert numbers[numbers > 3].tolist() == [4, 5]
        assert numbers[torch.tensor([1]), 0].tolist() == [3]
        assert numbers[True].shape == (1, 2, 3)
    assert "__getitem__" not in vars(torch.Tensor)

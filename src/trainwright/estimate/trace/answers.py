"""What a training step asks of data that is not there.

A few operators give a Python number, or a tensor whose shape depends on values. Each answer is a rule stated here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten

ITEM = aten._local_scalar_dense.default
NONZERO = aten.nonzero.default
ONE_HOT = aten.scatter_.value
INDEXED = (aten.index.Tensor, aten._index_put_impl_.default, aten.index_put.default, aten.index_put_.default)


@dataclass
class Answers:
    """`mask_is_full`: no padding and no packing, so that "are all of these true" is answered with yes.

    `learned_share`: share of the positions that a mask over positions selects.
    """

    mask_is_full: bool
    learned_share: float
    _densities: dict[int, float] = field(default_factory=dict)

    def item(self, tensor: torch.Tensor) -> bool | int | float:
        """Answer `.item()` and `bool()`: of a comparison as `mask_is_full`, of a number with 1."""
        if tensor.dtype == torch.bool:
            return self.mask_is_full
        return 1.0 if tensor.is_floating_point() else 1

    def note_one_hot(self, target: torch.Tensor, dim: int, index: torch.Tensor) -> None:
        """Remember how dense a one-hot tensor is, such as the mask that sends tokens to experts."""
        self._densities[target.untyped_storage()._cdata] = index.shape[dim] / target.shape[dim]

    def forget(self, storage: int) -> None:
        """Drop what is known of a storage that is gone."""
        self._densities.pop(storage, None)

    def selected(self, mask: torch.Tensor) -> int:
        """Return how many elements of a mask are true: tokens spread evenly over experts; learned positions else."""
        share = self._densities.get(mask.untyped_storage()._cdata, self.learned_share)
        return math.ceil(int(mask.numel()) * share)

    def nonzero(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return indices of as many elements as are taken to be true."""
        return torch.empty(self.selected(tensor), tensor.dim(), dtype=torch.int64, device=tensor.device)

    def as_indices(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replace masks by the indices they select, as CUDA does first (ATen/native/IndexingUtils.h)."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                found.extend(self.nonzero(index).unbind(1))
            else:
                found.append(index)
        return found


def has_mask(args: Sequence[Any]) -> bool:
    """Whether an indexing operator is given a mask."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])

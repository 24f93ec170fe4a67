"""Rows of different length as one tensor; torch is imported at the first, as data are prepared without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def pad_right(rows: Sequence[np.ndarray], fill: int) -> torch.Tensor:
    """Return rows of integers as int64 (rows, longest), the shorter ones filled up on the right."""
    import torch

    padded = np.full((len(rows), max(len(row) for row in rows)), fill, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(padded)


def attention_mask(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Return 1 where `pad_right` has the rows' own values and 0 where it filled up, int64 (rows, longest)."""
    return pad_right([np.ones(len(row), dtype=np.int64) for row in rows], 0)

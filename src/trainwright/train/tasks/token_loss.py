"""The loss of a batch of labelled positions; torch is imported at the first, as data are prepared without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.train.data.packing import IGNORED

if TYPE_CHECKING:
    import torch


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy summed over the labels that are learned; logits (..., vocabulary), labels (...).

    Only the logits of learned positions become fp32: with a large vocabulary they take more memory than all else.
    The sum itself is taken in fp64 where the device has it: in fp32 it keeps 7 digits of a sum over hundreds of
    targets, so that how a global batch is cut into micro-batches would show in the loss.
    """
    import torch
    from torch.nn import functional

    learned = labels != IGNORED
    losses = functional.cross_entropy(logits[learned].float(), labels[learned], reduction="none")
    return losses.sum(dtype=torch.float32 if losses.device.type == "mps" else torch.float64)

"""The loss of a causal model as it was in an earlier transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

NAME = "ForCausalLMWithShiftedCopy"


def copy_shifted_logits(model: nn.Module) -> None:
    """Let a model compute its loss as transformers 4.46 to 4.48 do: loss/loss_utils.py, `ForCausalLMLoss`.

    They cut off the last position of the logits by a copy in fp32; since 4.49 the labels are padded instead.
    """
    if hasattr(model, "loss_function"):
        from transformers.loss.loss_utils import LOSS_MAPPING

        LOSS_MAPPING[NAME] = _with_shifted_copy
        model.loss_type = NAME  # type: ignore[assignment]


def _with_shifted_copy(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    targets = labels[..., 1:].contiguous().view(-1)
    return functional.cross_entropy(shifted, targets)

"""Arithmetic of the forward and backward pass: autocast, and the loss scale that fp16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Return the context in which a forward pass runs."""
    if precision == "fp32":
        return nullcontext()
    context: AbstractContextManager[None] = torch.autocast(device.type, dtype=COMPUTE_DTYPES[precision])
    return context


@dataclass
class LossScale:
    """Dynamic loss scale for fp16, driven by the global gradient norm, so that all ranks decide alike.

    Same rule and constants as `torch.amp.GradScaler`: half after an overflow, double after 2,000 good steps.
    """

    value: float = 65536.0
    good_steps: int = 0

    def update(self, overflowed: bool) -> None:
        """Adapt the scale after a step."""
        if overflowed:
            self.value, self.good_steps = self.value / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == 2000:
            self.value, self.good_steps = self.value * 2, 0

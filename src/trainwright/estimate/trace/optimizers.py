"""The optimizers of a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainwright.estimate.request import Request

BLOCK = 256
SMALLEST_QUANTIZED = 4096


class AdamW8bit(torch.optim.Optimizer):
    """The states of bitsandbytes' `AdamW8bit`; its CUDA kernel updates in place and takes nothing else.

    bitsandbytes/optim/optimizer.py: two moments of one byte each with an fp32 scale for every 256, two tables of 256
    (shared on a device), and fp32 moments for parameters of fewer than 4096 elements.
    """

    def __init__(self, groups: Iterable[Any]) -> None:
        super().__init__(list(groups), {})
        self._tables: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Make the states when they are first needed."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or self.state[parameter]:
                    continue
                if parameter.numel() < SMALLEST_QUANTIZED:
                    self.state[parameter] = {
                        name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")
                    }
                    continue
                if not self._tables:
                    self._tables = [torch.empty(256, device=parameter.device) for _ in range(2)]
                blocks = -(-parameter.numel() // BLOCK)
                self.state[parameter] = {
                    "state1": torch.zeros_like(parameter, dtype=torch.uint8),
                    "state2": torch.zeros_like(parameter, dtype=torch.uint8),
                    "absmax1": torch.zeros(blocks, device=parameter.device),
                    "absmax2": torch.zeros(blocks, device=parameter.device),
                }


def build_optimizer(model: nn.Module, request: Request) -> torch.optim.Optimizer:
    """Return the optimizer over the trained parameters; the workers keep biases and norms in a group of their own."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    others = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": params} for params in (matrices, others) if params]
    if request.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        adafactor: torch.optim.Optimizer = Adafactor(
            groups, lr=1e-4, scale_parameter=False, relative_step=False, warmup_init=False
        )
        return adafactor
    if request.optimizer == "adamw_8bit":
        return AdamW8bit(groups)
    how = {"adamw": {"fused": True}, "adamw_foreach": {"foreach": True}, "adamw_loop": {"foreach": False}}
    return torch.optim.AdamW(groups, lr=1e-4, **how[request.optimizer])


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all tensors of an optimizer's states."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]

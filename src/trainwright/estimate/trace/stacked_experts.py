"""Experts as a list of linear layers, where transformers 5 stacks them into two parameters of three dimensions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class SeparateExperts(nn.Module):
    """The loop over experts of transformers 4.48 (models/mixtral/modeling_mixtral.py, `MixtralSparseMoeBlock`)."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        experts, doubled, hidden = stacked.gate_up_proj.shape
        how = {"bias": False, "dtype": stacked.gate_up_proj.dtype, "device": stacked.gate_up_proj.device}
        self.gate_proj = nn.ModuleList(nn.Linear(hidden, doubled // 2, **how) for _ in range(experts))
        self.up_proj = nn.ModuleList(nn.Linear(hidden, doubled // 2, **how) for _ in range(experts))
        self.down_proj = nn.ModuleList(nn.Linear(doubled // 2, hidden, **how) for _ in range(experts))
        self.act_fn = stacked.act_fn

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the `chosen` experts (tokens, experts of a token) of `hidden` (tokens, size)."""
        weights = weights.to(hidden.dtype)
        total = torch.zeros_like(hidden)
        mask = nn.functional.one_hot(chosen, num_classes=len(self.gate_proj)).permute(2, 1, 0)
        for index, (gate, up, down) in enumerate(zip(self.gate_proj, self.up_proj, self.down_proj, strict=True)):
            place, token = torch.where(mask[index])
            tokens = hidden[None, token].reshape(-1, hidden.shape[-1])
            result = down(self.act_fn(gate(tokens)) * up(tokens)) * weights[token, place, None]
            total.index_add_(0, token, result.to(hidden.dtype))
        return total


def separate(model: nn.Module) -> None:
    """Replace stacked experts without biases; models that never stacked them stay as they are."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if _is_stacked(child):
                setattr(module, name, SeparateExperts(child))


def _is_stacked(module: nn.Module) -> bool:
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    if shapes.keys() != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
        return False
    up, down = shapes["gate_up_proj"], shapes["down_proj"]
    return len(up) == len(down) == 3 and up[1] == 2 * down[2]

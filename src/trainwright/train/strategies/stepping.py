"""The optimizer step that single, DDP and FSDP2 share: unscale, measure, clip, update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainwright.train.optimizers import set_learning_rate
from trainwright.train.precision import LossScale


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    learning_rate: float,
    max_grad_norm: float,
    loss_scale: LossScale | None,
) -> float:
    """Clip to `max_grad_norm` (0: not at all), update, clear the gradients; return the norm before clipping.

    Where it is not finite nothing is updated: under fp16 the loss scale falls and the run goes on, as
    `torch.amp.GradScaler` does; otherwise the step loop ends the run.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if loss_scale is not None:
        torch._foreach_mul_(gradients, 1 / loss_scale.value)
    total = torch.nn.utils.get_total_norm(gradients, foreach=True)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
    finite = math.isfinite(norm)
    if finite:
        if max_grad_norm > 0 and norm > max_grad_norm:
            torch._foreach_mul_(gradients, max_grad_norm / (norm + 1e-6))
        set_learning_rate(optimizer, learning_rate)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if loss_scale is not None:
        loss_scale.update(overflowed=not finite)
    return norm

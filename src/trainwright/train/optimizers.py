"""The optimizers, over the parameters that are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainwright.errors import not_installed
from trainwright.job.schema import TrainSection


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trained parameters in decayed and not decayed ones: matrices decay, biases and norms do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if _dimensions(parameter) >= 2]
    others = [parameter for parameter in trained if _dimensions(parameter) < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _dimensions(parameter: nn.Parameter) -> int:
    """Of the whole parameter, of which DeepSpeed may hold a flat part."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def build_optimizer(model: nn.Module, train: TrainSection) -> torch.optim.Optimizer:
    """Return the job's optimizer; its learning rate is 0 until the step loop sets it, before each step."""
    groups = parameter_groups(model, train.weight_decay)
    if train.optim == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=0.0, scale_parameter=False, relative_step=False, warmup_init=False)
    betas = (train.adam_beta1, train.adam_beta2)
    if train.optim == "adamw_8bit":
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError as error:
            raise not_installed(
                "train.optim=adamw_8bit", "bitsandbytes", extra="qlora", instead="train.optim=adamw"
            ) from error
        return AdamW8bit(groups, lr=0.0, betas=betas, eps=train.adam_epsilon)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=train.adam_epsilon, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate

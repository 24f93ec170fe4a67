"""One process, or DDP: every rank holds the whole model and the whole optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright.job.schema import TrainSection
from trainwright.train.optimizers import build_optimizer
from trainwright.train.precision import LossScale
from trainwright.train.strategies.states import (
    restore_state,
    saved_tensors,
    state_tensors,
    stored_name,
    trained_parameters,
)
from trainwright.train.strategies.stepping import clip_and_step
from trainwright.train.tensors import TensorReader


class Replicated:
    """The whole model on each rank; DDP averages the gradients where there are several."""

    passes_are_collective = False

    def __init__(self, model: nn.Module, train: TrainSection, *, device: torch.device, name: str, fp16: bool) -> None:
        self.name = name
        self.module = model if is_quantized(model) else model.to(device)
        self._adapters_only = hasattr(model, "peft_config")
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.forward: nn.Module = self.module
        if name == "ddp":
            ids = [device.index] if device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.module, device_ids=ids, gradient_as_bucket_view=True)
            settle_buckets(self.forward)
        self.optimizer = build_optimizer(self.module, train)
        self._trained = [parameter for _, parameter in trained_parameters(self.module)]
        self._loss_scale = LossScale() if fp16 else None

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Hold back DDP's all-reduce until the last micro-batch."""
        if isinstance(self.forward, DistributedDataParallel) and not last:
            context: AbstractContextManager[None] = self.forward.no_sync()
            return context
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate; DDP divides by the world size, so the share is multiplied by it first."""
        scale = self._loss_scale.value if self._loss_scale else 1.0
        (loss * (self._world_size * scale)).backward()

    def step(self, learning_rate: float, max_grad_norm: float) -> float:
        """Clip and update."""
        return clip_and_step(self.optimizer, self._trained, learning_rate, max_grad_norm, self._loss_scale)

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors; they are whole already."""
        for name, tensor in saved_tensors(self.module, adapters_only=self._adapters_only):
            yield stored_name(name), tensor

    def gather_optimizer(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the optimizer states; they are whole already."""
        for name, parameter in trained_parameters(self.module):
            for key, value in state_tensors(self.optimizer, parameter).items():
                yield f"{stored_name(name)}.{key}", value

    def load_weights(self, reader: TensorReader) -> None:
        """Copy the weights in."""
        with torch.no_grad():
            for name, tensor in saved_tensors(self.module, adapters_only=self._adapters_only):
                tensor.copy_(reader.whole(stored_name(name)))

    def load_optimizer(self, reader: TensorReader) -> None:
        """Copy the optimizer states in."""
        for name, parameter in trained_parameters(self.module):
            restore_state(self.optimizer, parameter, stored_name(name), reader, reader.whole)

    def scalars(self) -> dict[str, float]:
        """Return the loss scale."""
        if self._loss_scale is None:
            return {}
        return {"loss_scale": self._loss_scale.value, "good_steps": self._loss_scale.good_steps}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Take the loss scale back."""
        if self._loss_scale is not None and "loss_scale" in scalars:
            self._loss_scale = LossScale(scalars["loss_scale"], int(scalars["good_steps"]))

    def found(self) -> dict[str, str]:
        """Return what really runs."""
        wrapped = isinstance(self.forward, DistributedDataParallel)
        return {"strategy": "ddp" if wrapped else "single"}


def settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Let DDP lay out its buckets for good before the first step.

    DDP lays them out anew after the first backward pass of each start, in the order in which gradients came (torch
    2.13, reducer.cpp, `rebuild_buckets`). Where more than two ranks add up, the order of a sum depends on where a
    gradient lies in its bucket, so the first step after a resume would round otherwise than in a run that went through.
    """
    trained = [parameter for parameter in wrapped.module.parameters() if parameter.requires_grad]
    wrapped.module.forward = lambda: torch.stack([parameter.sum().float() * 0.0 for parameter in trained]).sum()
    try:
        wrapped().backward()
    finally:
        del wrapped.module.forward
    for parameter in trained:
        parameter.grad = None


def is_quantized(model: nn.Module) -> bool:
    """Say whether the base is packed in 4 bits."""
    return getattr(model, "is_loaded_in_4bit", False) or getattr(
        getattr(model, "base_model", None), "is_loaded_in_4bit", False
    )

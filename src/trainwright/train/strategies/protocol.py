"""What the step loop asks of a strategy, whatever it is built on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from trainwright.train.tensors import TensorReader


class Strategy(Protocol):
    """A model on its devices, with its optimizer.

    Tensors pass through the checkpoint whole and under the model's own names, so that what one strategy saved any
    other can load, on any number of ranks. All `gather_*` methods are collective: every rank must exhaust them.
    """

    name: str
    module: nn.Module
    """The model with its own parameter names."""
    forward: nn.Module
    """What a batch is passed to."""
    passes_are_collective: bool
    """Whether ranks communicate in every pass, so that each has to make as many; else in the last one alone."""

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Surround the forward and backward pass of one micro-batch; gradients are exchanged in the last one."""

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate this rank's share of the loss of the global batch; shares add up over ranks."""

    def step(self, learning_rate: float, max_grad_norm: float) -> float:
        """Clip and update; return the gradient norm before clipping, inf where fp16 overflowed and nothing moved."""

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole tensor of each parameter and persistent buffer; only trained ones under adapters."""

    def gather_optimizer(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole tensor of each optimizer state as `<parameter>.<state>`."""

    def load_weights(self, reader: TensorReader) -> None:
        """Take the weights from a checkpoint."""

    def load_optimizer(self, reader: TensorReader) -> None:
        """Take the optimizer state from a checkpoint."""

    def scalars(self) -> dict[str, float]:
        """Return what else must survive a restart, such as the loss scale."""

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Take back what `scalars` returned."""

    def found(self) -> dict[str, str]:
        """Return what really runs, read off the live objects: strategy, backend, parameter and compute dtype."""

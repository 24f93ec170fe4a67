"""One optimizer step, as this project's workers do it and as transformers' Trainer does it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from trainwright.errors import UserError
from trainwright.estimate.request import Request
from trainwright.estimate.trace import streams
from trainwright.estimate.trace.batches import Batch
from trainwright.estimate.trace.model import DTYPES

IGNORED = -100


class Recipe(Protocol):
    """What differs between trainers."""

    def micro_step(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of one micro-batch, ready for `backward`."""

    def update(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], model: nn.Module) -> None:
        """Clip, update and clear the gradients."""

    def evaluate(self, model: nn.Module, batch: Batch) -> None:
        """Go forward without gradients."""


def recipe_of(request: Request) -> Recipe:
    """Return the recipe of a request."""
    return WorkersStep(request) if request.recipe == "trainwright" else TrainerStep(request)


def autocast(request: Request) -> AbstractContextManager[None]:
    """Return the context of a forward pass."""
    dtype = DTYPES[request.precision]
    if not request.autocast or dtype == torch.float32:
        return nullcontext()
    context: AbstractContextManager[None] = torch.autocast(request.device, dtype=dtype)
    return context


class WorkersStep:
    """The step of trainwright/train/loop.py; tests/estimate compares its memory with that of the workers' own code."""

    def __init__(self, request: Request) -> None:
        if request.auto_class not in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"):
            raise UserError(
                f"recipe trainwright: the workers' tasks train no {request.auto_class}",
                hints=["recipe=transformers takes the model's own loss"],
            )
        self._request = request
        self._seq2seq = request.auto_class == "AutoModelForSeq2SeqLM"
        self._loss_sum: torch.Tensor | None = None

    def micro_step(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the sum of the loss over the learned positions, scaled."""
        if self._loss_sum is None:
            self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._request.device)
        with autocast(self._request):
            loss = self._sum(model, batch) * 1.0
        self._loss_sum += loss.detach()
        return (loss / 2.0) * 2.0

    def update(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], model: nn.Module) -> None:
        """Measure the norm, clip, update: trainwright/train/strategies/stepping.py."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self._request.precision == "fp16":
            torch._foreach_mul_(gradients, 0.5)
        total = torch.nn.utils.get_total_norm(gradients, foreach=True)
        float(total.full_tensor() if isinstance(total, DTensor) else total)
        if self._request.max_grad_norm > 0:
            torch._foreach_mul_(gradients, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._loss_sum = None

    def evaluate(self, model: nn.Module, batch: Batch) -> None:
        """Sum the loss: trainwright/train/evaluation.py."""
        with torch.no_grad(), autocast(self._request):
            self._sum(model, batch)

    def _sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        labels = batch["labels"]
        if self._seq2seq:
            own = getattr(model, "module", model)
            start = own.prepare_decoder_input_ids_from_labels(labels=labels)
            return _cross_entropy_sum(model(**inputs, decoder_input_ids=start, use_cache=False).logits, labels)
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        return _cross_entropy_sum(logits, labels[:, 1:])


def _cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """trainwright/train/tasks/token_loss.py: only learned positions become fp32."""
    learned = labels != IGNORED
    losses = functional.cross_entropy(logits[learned].float(), labels[learned], reduction="none")
    return losses.sum(dtype=torch.float64)


class TrainerStep:
    """The step of transformers/trainer.py (`training_step`) on accelerate, with the model's own loss."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def micro_step(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the model's loss; under autocast accelerate turns all outputs into fp32, logits too."""
        loss: torch.Tensor = self._outputs(model, batch)["loss"]
        return loss / self._request.gradient_accumulation_steps

    def update(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], model: nn.Module) -> None:
        """Clip, update, clear."""
        streams.wait()  # transformers/trainer.py looks whether the loss is a number (`logging_nan_inf_filter`)
        if self._request.max_grad_norm > 0 and self._request.strategy != "fsdp1":
            torch.nn.utils.clip_grad_norm_(parameters, self._request.max_grad_norm)
        optimizer.step()
        model.zero_grad()

    def evaluate(self, model: nn.Module, batch: Batch) -> None:
        """Go forward: transformers/trainer.py (`prediction_step`)."""
        with torch.no_grad():
            self._outputs(model, batch)

    def _outputs(self, model: nn.Module, batch: Batch) -> Any:
        with autocast(self._request):
            outputs = model(**batch)
        if not self._request.autocast or self._request.precision == "fp32":
            return outputs
        from accelerate.utils.operations import convert_to_fp32

        return convert_to_fp32(outputs)

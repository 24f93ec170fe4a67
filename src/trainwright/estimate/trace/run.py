"""A traced run: two optimizer steps, the second with the optimizer's states already there."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from trainwright.errors import ExitCode, UserError
from trainwright.estimate.request import Request
from trainwright.estimate.trace import fake_cuda, kernels
from trainwright.estimate.trace.answers import Answers
from trainwright.estimate.trace.batches import make_batch
from trainwright.estimate.trace.distributed import fake_group, synchronize_in, wrap
from trainwright.estimate.trace.indexing import full_slices
from trainwright.estimate.trace.model import (
    DTYPES,
    build_config,
    build_model,
    parameter_counts,
)
from trainwright.estimate.trace.optimizers import build_optimizer, state_tensors
from trainwright.estimate.trace.steps import recipe_of
from trainwright.estimate.trace.tracker import Records, TracePhase, Tracker

STEPS = 2


@dataclass(frozen=True)
class Run:
    """What happened; `static_bytes` is what the model and nothing else held before the first step."""

    tracker: Records
    parameters: dict[str, int]
    static_bytes: int
    attention: dict[str, int]


def trace(request: Request, *, layers: int | None = None) -> Run:
    """Run the request on fake tensors, with another number of layers if asked for.

    Raises:
        UserError: the model refuses this precision, or does what depends on data in a way that has no rule.
    """
    if request.strategy.startswith("zero"):
        raise UserError(
            f"{request.strategy} cannot be traced: DeepSpeed's engine needs a GPU",
            hints=["estimate it with the closed form"],
        )
    prepare()
    with fake_group(request) as mesh:
        try:
            return run(request, FakeTensorMode(allow_non_fake_inputs=True), mesh=mesh, layers=layers)
        except DynamicOutputShapeException as error:
            raise untraceable(f"the shape of {error.func} depends on data") from error
        except RuntimeError as error:  # how torch refuses dtypes and shapes, on fake tensors as on real ones
            raise untraceable(str(error).strip().splitlines()[0]) from error


def untraceable(reason: str, problems: Sequence[str] = ()) -> UserError:
    """Say why fake tensors cannot pass here."""
    return UserError(
        f"the model cannot be traced: {reason}",
        problems=problems,
        hints=["estimate it with the closed form, or measure it"],
        exit_code=ExitCode.FAILED,
    )


def prepare(*, with_adapters: bool = False) -> None:
    """Import the libraries and make fake tensors work, for this process; several traces may follow."""
    import transformers

    transformers.logging.set_verbosity_error()
    if with_adapters:
        import peft  # noqa: F401
    fake_cuda.install()


def run(request: Request, mode: AbstractContextManager[Any], *, mesh: Any = None, layers: int | None = None) -> Run:
    """Run the request under `mode`: fake tensors, or real ones on the CPU with `nullcontext()`."""
    config = build_config(request, layers=layers)
    on_cuda = request.device == "cuda"
    tracker = Tracker(
        request.device,
        Answers(mask_is_full=request.seen_batch == "full", learned_share=request.learned_share),
        capability=request.compute_capability if on_cuda else None,
        vocabulary=getattr(config, "vocab_size", None),
    )
    _play_device(request)
    with mode, tracker, full_slices(request.full_slices):
        model = build_model(request, config)
        if isinstance(mode, nullcontext):
            _give_values(model)
        counts = parameter_counts(model)
        if request.strategy == "fsdp1":
            tracker.phase = TracePhase("wrapping", 0)
        forward = wrap(model, request, mesh)
        gc.collect()
        label_model(tracker, forward)
        optimizer = build_optimizer(forward, request)
        static_bytes = tracker.live_bytes()
        for step in range(1, STEPS + 1):
            _step(tracker, request, config, forward, optimizer, step)
        if request.evaluation_batch_size is not None:
            _evaluate(tracker, request, config, forward)
    return Run(tracker, counts, static_bytes, dict(kernels.DEVICE.attention_used))


def _play_device(request: Request) -> None:
    device = kernels.DEVICE
    device.compute_capability = request.compute_capability
    device.attention = "auto" if request.attention in ("eager", "flash_attention_2") else request.attention
    device.attention_used.clear()


def _give_values(model: nn.Module) -> None:
    """Real tensors were never initialized: give them values that stay finite."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)


def _step(
    tracker: Tracker, request: Request, config: Any, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    recipe = recipe_of(request)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    pixels = torch.float32 if request.autocast else DTYPES[request.base_dtype]
    for index in range(request.gradient_accumulation_steps):
        tracker.phase = TracePhase("forward", step)
        batch = make_batch(request, config, request.micro_batch_size, pixels=pixels)
        tracker.label(batch.values(), "inputs")
        last = index == request.gradient_accumulation_steps - 1
        with synchronize_in(model, last=last, each=request.sync_each_micro_batch):
            loss = recipe.micro_step(model, batch)
            tracker.phase = TracePhase("backward", step)
            loss.backward()
        del loss
        tracker.label((p.grad for p in trained if p.grad is not None), "gradients")
    tracker.phase = TracePhase("optimizer", step)
    recipe.update(optimizer, trained, model)
    tracker.label(state_tensors(optimizer), "optimizer")


def _evaluate(tracker: Tracker, request: Request, config: Any, model: nn.Module) -> None:
    assert request.evaluation_batch_size is not None
    tracker.phase = TracePhase("evaluation", STEPS)
    model.eval()
    pixels = torch.float32 if request.autocast else DTYPES[request.base_dtype]
    batch = make_batch(request, config, request.evaluation_batch_size, pixels=pixels)
    tracker.label(batch.values(), "inputs")
    recipe_of(request).evaluate(model, batch)


def label_model(tracker: Tracker, model: nn.Module) -> None:
    """Say which memory is the model's: weights, and what peft added to them."""
    adapted = any("lora_" in name for name, _ in model.named_parameters())
    tracker.label(model.buffers(), "weights")
    for parameter in model.parameters():
        tracker.label([parameter], "adapters" if adapted and parameter.requires_grad else "weights")

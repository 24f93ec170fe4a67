"""A user's own training script on a GPU that is not there, up to the end of its second optimizer step.

It runs unmodified, as `python train.py` would run it: plain torch, accelerate, transformers' Trainer. It stops before
it can save what is no model. What it does until then it really does, but for saving.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from trainwright.errors import ExitCode, UserError
from trainwright.estimate.script_request import ScriptRequest
from trainwright.estimate.trace import fake_cuda, fake_gpu, fake_group, kernels, saving, values, weights
from trainwright.estimate.trace.model import let_masks_be_skipped, parameter_counts, without_initial_values
from trainwright.estimate.trace.optimizers import state_tensors
from trainwright.estimate.trace.run import Run, label_model, untraceable
from trainwright.estimate.trace.tracker import TracePhase
from trainwright.estimate.trace.values import AskedDevices, KnownAnswers, ScriptTracker


class _Finished(BaseException):
    """All steps that were asked for are made; no `except Exception` of the script holds it up."""


class _OutOfTime(BaseException):
    """The limit has passed."""


def trace_script(request: ScriptRequest) -> Run:
    """Run the script until its optimizer has made the steps asked for.

    Raises:
        UserError: it fails, ends without training, takes too long, or does what depends on data without a rule.
    """
    fake_cuda.install()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = ScriptTracker("cuda", KnownAnswers(), capability=request.compute_capability, vocabulary=None)
    progress = _Progress(request, tracker)
    fake_gpu.install(request, tracker)
    values.install()
    weights.install(mode)
    saving.prevent()
    started = _as_started(request), fake_group.joined(request), without_initial_values()
    with ExitStack() as stack:
        for context in (*started, progress.watched(), AskedDevices(), mode, tracker):
            stack.enter_context(context)
        ended = _run(request)
    if not progress.finished:
        raise UserError(
            f"`{request.path}` {ended} after {progress.steps()} of {request.steps} optimizer steps",
            hints=["give it enough data and epochs for them", "an optimizer must be one of torch.optim's kind"],
            exit_code=ExitCode.FAILED,
        )
    return Run(tracker, progress.parameters, progress.static_bytes, dict(kernels.DEVICE.attention_used))


def _run(request: ScriptRequest) -> str:
    try:
        with _limited(request.limit_s):
            runpy.run_path(request.script[0], run_name="__main__")
    except _Finished:
        return "finished"
    except _OutOfTime as error:
        raise UserError(
            f"`{request.path}` has not made {request.steps} optimizer steps in {request.limit_s:g} s",
            problems=_places(error, request),
            hints=["raise limit_s, or give it less data to prepare"],
            exit_code=ExitCode.FAILED,
        ) from error
    except SystemExit as error:
        if error.code not in (None, 0):
            raise _failed(f"exited with {error.code}", error, request) from error
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise untraceable(
            f"what {error.func} gives depends on data that is not there", problems=_places(error, request)
        ) from error
    except Exception as error:  # whatever a user's script may raise
        traceback.print_exception(error)
        said = (str(error).strip() or "without a word").splitlines()[0]
        if "Creating a new Tensor subclass" in said:  # 4-bit weights of bitsandbytes, tensors of torchao
            raise untraceable(said, problems=_places(error, request)) from error
        raise _failed(f"raised {type(error).__name__}: {said}", error, request) from error
    return "ended"


def _failed(what: str, error: BaseException, request: ScriptRequest) -> UserError:
    return UserError(
        f"`{request.path}` {what}",
        problems=_places(error, request),
        hints=["see whether it runs on a machine with a GPU", "weights and data have to be there, on this machine"],
        exit_code=ExitCode.FAILED,
    )


def _places(error: BaseException, request: ScriptRequest) -> list[str]:
    """Say where in the user's own files it was."""
    folder = request.path.resolve().parent
    frames = traceback.extract_tb(error.__traceback__)
    files = [Path(frame.filename).resolve() for frame in frames]
    own = [
        frame
        for frame, file in zip(frames, files, strict=True)
        if folder in file.parents and "site-packages" not in file.parts
    ]
    return [f"{Path(frame.filename).resolve()}:{frame.lineno}: {frame.line}" for frame in own[-1:]]


class _Progress:
    """Follows a script through its phases by the hooks that torch has for all modules and optimizers."""

    def __init__(self, request: ScriptRequest, tracker: ScriptTracker) -> None:
        self._wanted, self._tracker = request.steps, tracker
        self._made: Counter[int] = Counter()
        self.finished = False
        self._records_at_end = 0
        self.static_bytes = 0
        self.parameters: dict[str, int] = {}
        tracker.phase = TracePhase("preparation", 1)

    def steps(self) -> int:
        """Return the steps that every optimizer has made which has made any."""
        return min(self._made.values(), default=0)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch meanwhile."""
        backward = torch.autograd.backward

        def watched_backward(*args: Any, **kwargs: Any) -> None:
            self._tracker.phase = TracePhase("backward", self.steps() + 1)
            try:
                backward(*args, **kwargs)
            finally:
                self._tracker.phase = TracePhase("optimizer", self.steps() + 1)

        self._first_forward = register_module_forward_pre_hook(self._begin)
        hooks = [
            self._first_forward,
            register_optimizer_step_pre_hook(self._update),
            register_optimizer_step_post_hook(self._updated),
        ]
        torch.autograd.backward = watched_backward
        try:
            yield
        finally:
            torch.autograd.backward = backward
            for hook in hooks:
                hook.remove()
            if self.finished:
                del self._tracker.records[self._records_at_end :]  # what the script drops as it is stopped

    def _begin(self, module: nn.Module, args: Any) -> None:
        """The first forward pass of a model in training mode ends the preparation."""
        if not module.training or not torch.is_grad_enabled() or not any(True for _ in module.parameters()):
            return
        self._first_forward.remove()
        let_masks_be_skipped()
        saving.prevent()
        label_model(self._tracker, module)
        self._tracker.adopt(module)
        self.parameters = parameter_counts(module)
        self.static_bytes = self._tracker.held_by("weights", "adapters")
        module.register_forward_pre_hook(self._forward)
        self._forward(module, args)

    def _forward(self, module: nn.Module, args: Any) -> None:
        self._tracker.phase = TracePhase("forward", self.steps() + 1)

    def _update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._tracker.label(gradients, "gradients")

    def _updated(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._tracker.label(state_tensors(optimizer), "optimizer")
        self._made[id(optimizer)] += 1
        if self.steps() >= self._wanted:
            self.finished = True
            self._records_at_end = self._records_at_end or self._tracker.position()
            raise _Finished


@contextmanager
def _as_started(request: ScriptRequest) -> Iterator[None]:
    """Be the process that `python SCRIPT ARGUMENTS`, or torchrun as rank 0, would have started."""
    path = request.path.resolve()
    arguments, folders, place = sys.argv, sys.path[:], Path.cwd()
    sys.argv = list(request.script)
    sys.path.insert(0, str(path.parent))
    os.chdir(request.working_directory)
    loader = DataLoader._get_iterator

    def in_this_process(self: Any) -> Any:
        """Workers would be processes without a fake GPU; what they hold is not on it."""
        self.num_workers, self.prefetch_factor, self.timeout, self.pin_memory = 0, None, 0, False
        return loader(self)

    DataLoader._get_iterator = in_this_process
    try:
        yield
    finally:
        DataLoader._get_iterator = loader
        sys.argv, sys.path[:] = arguments, folders
        os.chdir(place)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.2)  # again, as Python drops what is raised in a finalizer
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)

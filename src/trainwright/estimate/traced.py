"""What only torch can tell, asked of a process of its own: the memory of a traced step, the parameters of any model.

What it told once is kept (`recorded_traces`), so that it need not be asked, or be there, a second time.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainwright.anatomy.weight_shapes import ModelShapes
from trainwright.errors import ExitCode, UserError
from trainwright.estimate.cuda_overhead import outside_bytes
from trainwright.estimate.figures import Memory
from trainwright.estimate.recorded_traces import (
    RecordedTraces,
    installed,
    kept_traces,
    require_same_model,
    source_of,
)
from trainwright.estimate.request import Request
from trainwright.hardware.catalog import GpuSpec

PATIENCE_S = 600
"""A 70 B model takes 20 s on an idle core; this one may be busy."""


def traced_memory(request: Request, gpu: GpuSpec | None = None, given: RecordedTraces | None = None) -> Memory:
    """The peak memory of one rank; `gpu` says what lies outside torch's allocator, `given` what was handed over.

    Raises:
        UserError: the step cannot be traced (ZeRO, or what the model's own code does), with the reason; or torch is not
            there, and nobody traced this step before.
    """
    answer = _recorded_step(request, given)
    peak, evaluation = answer["peak"], answer.get("evaluation")
    outside = outside_bytes(request, gpu)
    return Memory(
        allocated_bytes=peak["allocated_bytes"],
        reserved_bytes=peak["reserved_bytes"],
        device_bytes=peak["reserved_bytes"] + sum(outside.values()),
        parts_bytes={part: size for part, size in peak["parts_bytes"].items() if part != "cached"},
        outside_bytes=outside,
        peak=f"{peak['phase']}: {peak['operator']}",
        evaluation_bytes=None if evaluation is None else evaluation["requested_bytes"],
        evaluation_reserved_bytes=None if evaluation is None else evaluation["reserved_bytes"],
    )


def is_recorded(request: Request, given: RecordedTraces | None = None) -> bool:
    """Whether a step was traced before."""
    return _recorded(request, given) is not None


def _recorded(request: Request, given: RecordedTraces | None) -> Mapping[str, Any] | None:
    for traces in (given, kept_traces(request.config, request.auto_class)):
        if traces is not None and (found := traces.step(request)) is not None:
            return found
    return None


def _recorded_step(request: Request, given: RecordedTraces | None) -> Mapping[str, Any]:
    if (found := _recorded(request, given)) is not None:
        return found
    if not torch_is_there():
        where = "" if given is None else f", and {given.file} has no step of this layout"
        raise UserError(f"torch and transformers are not installed here{where}", exit_code=ExitCode.MISSING)
    answer = _asked({"request": dataclasses.asdict(request)}, packs=request.method.type == "qlora")
    kept_traces(request.config, request.auto_class).with_step(request, answer).keep()
    return answer


def shapes_on_meta(config: Mapping[str, Any], auto_class: str, given: RecordedTraces | None = None) -> ModelShapes:
    """Return the parameters of the model that transformers builds from a config, without its weights.

    Raises:
        UserError: transformers refuses the config, or does not know the model; or what was handed over is of another.
    """
    if given is not None:
        require_same_model(given, config, auto_class)
        if given.shapes is not None:
            return given.shapes
    kept = kept_traces(config, auto_class)
    if kept.shapes is not None:
        return kept.shapes
    answer = _asked({"shapes": {"config": dict(config), "auto_class": auto_class}}, packs=False)
    named = {name: tuple(shape) for name, shape in answer["parameters"].items()}
    shapes = ModelShapes(named, frozenset(answer["linear"]), source_of(installed()))
    dataclasses.replace(kept, shapes=shapes).keep()
    return shapes


def torch_is_there() -> bool:
    """Whether models can be built and steps traced with this Python."""
    return all(importlib.util.find_spec(package) is not None for package in ("torch", "transformers"))


@contextmanager
def torch_kept_open() -> Iterator[None]:
    """Let one process answer all questions that come up meanwhile: to import torch takes longer than most answers."""
    if _Asked.open is not None:
        yield
        return
    _Asked.open = {}
    try:
        yield
    finally:
        for process in _Asked.open.values():
            process.close()
        _Asked.open = None


class _Asked:
    """A process with torch that answers one question after the other."""

    open: dict[bool, _Asked] | None = None
    """Those that are kept, by whether they can pack weights into 4 bits."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainwright.estimate.trace.answer", "-"],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Ask and wait.

        Raises:
            UserError: the process ended, or gave no answer in time.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
                raise _refused(f"no answer in {PATIENCE_S} s")
            found: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            raise _refused(self._last_words()) from error
        return found

    def close(self) -> None:
        """End the process, which has nothing to finish."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _last_words(self) -> str:
        exit_code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return (lines or [f"exit code {exit_code}"])[-1]


def _asked(question: Mapping[str, Any], *, packs: bool) -> dict[str, Any]:
    kept = _Asked.open
    process = kept.pop(packs) if kept is not None and packs in kept else _Asked()
    try:
        answer = process.answer(question)
    except UserError:
        process.close()
        raise
    if kept is None:
        process.close()
    else:
        kept[packs] = process
    if "broken" in answer:
        raise _refused(answer["broken"])
    if "error" in answer:
        raise UserError(answer["error"], problems=answer["problems"], hints=answer["hints"])
    return answer


def _refused(reason: str) -> UserError:
    return UserError(f"the trace broke down: {reason}", exit_code=ExitCode.FAILED)

"""What only torch can tell, asked of a process of its own: the memory of a traced step, the parameters of any model."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from trainwright.anatomy.weight_shapes import ModelShapes
from trainwright.errors import ExitCode, UserError
from trainwright.estimate.cuda_overhead import outside_bytes
from trainwright.estimate.figures import Memory
from trainwright.estimate.request import Request
from trainwright.hardware.catalog import GpuSpec

PATIENCE_S = 600
"""A 70 B model takes 20 s on an idle core; this one may be busy."""


def traced_memory(request: Request, gpu: GpuSpec | None = None) -> Memory:
    """The peak memory of one rank; `gpu` says what lies outside torch's allocator.

    Raises:
        UserError: the step cannot be traced (ZeRO, or what the model's own code does), with the reason.
    """
    answer = _answer(request)
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


def torch_is_there() -> bool:
    """Whether models can be built and steps traced with this Python."""
    return all(importlib.util.find_spec(package) is not None for package in ("torch", "transformers"))


def shapes_on_meta(config: Mapping[str, Any], auto_class: str) -> ModelShapes:
    """Return the parameters of the model that transformers builds from a config, without its weights.

    Raises:
        UserError: transformers refuses the config, or does not know the model.
    """
    answer = _asked("trainwright.estimate.trace.shapes_on_meta", {"config": dict(config), "auto_class": auto_class})
    shapes = {name: tuple(shape) for name, shape in answer["parameters"].items()}
    return ModelShapes(shapes, frozenset(answer["linear"]), f"the model as transformers {answer['version']} builds it")


def _answer(request: Request) -> dict[str, Any]:
    return _asked("trainwright.estimate.trace.answer", dataclasses.asdict(request))


def _asked(module: str, question: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(question, file)
        file.flush()
        command = [sys.executable, "-m", module, file.name]
        without_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, env=without_gpu, capture_output=True, text=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise _refused(f"no answer in {PATIENCE_S} s") from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        raise _refused((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]) from error
    if "error" in answer:
        raise UserError(answer["error"], problems=answer["problems"], hints=answer["hints"])
    return answer


def _refused(reason: str) -> UserError:
    return UserError(f"the trace broke down: {reason}", exit_code=ExitCode.FAILED)

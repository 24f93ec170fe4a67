"""What the multi-GPU guide has its reader check by hand before a run (S3-32), checked before the workers start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.eval_config import EvalConfig
from trainwright.evaluate.replicas import ReplicaSet
from trainwright.hardware.inventory import Inventory
from trainwright.model_folder import CONFIG, read_model_config, require_whole

PROBE = "trainwright.evaluate.workers.probe"
PROBE_TIMEOUT_S = 120


@dataclass(frozen=True)
class EvalCheck:
    """One thing that was looked at; a problem stops the run, a warning does not. `fix` is what to do."""

    level: Literal["ok", "warning", "problem"]
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"check {self.level}: {self.what}{f'; {self.fix}' if self.fix else ''}"


def run_checks(asked: EvalConfig, inventory: Inventory, spread: ReplicaSet) -> list[EvalCheck]:
    """Return what was found of the driver, the environment, the packages, CUDA in torch, and the model."""
    return [
        *_driver(inventory, spread),
        _environment(),
        *_packages(asked, spread),
        *_cuda(spread),
        *_model(asked),
    ]


def require(checks: list[EvalCheck]) -> None:
    """Raise UserError (exit code 4) with all problems at once, if there are any."""
    problems = [check for check in checks if check.level == "problem"]
    if problems:
        raise UserError(
            "the evaluation cannot start here",
            problems=[check.what for check in problems],
            hints=[check.fix for check in problems if check.fix],
            exit_code=ExitCode.MISSING,
        )


def _driver(inventory: Inventory, spread: ReplicaSet) -> Iterator[EvalCheck]:
    if spread.on_cuda:
        count = sum(device.kind == "cuda" for device in inventory.devices)
        yield EvalCheck("ok", f"the NVIDIA driver {inventory.driver_version} answers, with {count} GPUs")
    else:
        kind = spread.replicas[0].label
        yield EvalCheck("warning", f"no NVIDIA GPU answers, {kind} does", "a model above 3B parameters will be slow")


def _environment() -> EvalCheck:
    version = ".".join(map(str, sys.version_info[:3]))
    name = os.environ.get("CONDA_DEFAULT_ENV")
    if name or sys.prefix != sys.base_prefix:
        return EvalCheck("ok", f"environment {name or sys.prefix}, Python {version}")
    return EvalCheck("warning", f"no virtual environment is active, Python {version} is the system's")


def _packages(asked: EvalConfig, spread: ReplicaSet) -> Iterator[EvalCheck]:
    needed = {"transformers": ["torch", "transformers"], "vllm": ["vllm"]}.get(asked.engine, [])
    if asked.engine == "auto" and not (spread.on_cuda and find_spec("vllm")):
        needed = ["torch", "transformers"]
    if spread.mode.value == "accelerate" or any(len(one.placement) > 1 for one in spread.replicas if spread.on_cuda):
        needed = [*needed, "accelerate"]
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        fix = "activate the environment that has them, or pip install 'trainwright[eval]'"
        yield EvalCheck("problem", f"{', '.join(missing)} cannot be imported by {sys.executable}", fix)
    elif needed:
        yield EvalCheck("ok", f"{', '.join(needed)} can be imported")


def _cuda(spread: ReplicaSet) -> Iterator[EvalCheck]:
    """Ask torch, in a process of its own with the workers' environment, whether it sees the GPUs."""
    if not spread.on_cuda or find_spec("torch") is None:
        return
    for replica in spread.replicas:
        answer = subprocess.run(
            [sys.executable, "-m", PROBE],
            capture_output=True,
            text=True,
            env={**os.environ, **replica.environment},
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
        if answer.returncode != 0:
            last = (answer.stderr.strip().splitlines() or ["no word"])[-1]
            yield EvalCheck("problem", f"torch does not start: {last}", "reinstall torch")
            return
        seen = json.loads(answer.stdout.splitlines()[-1])
        if not seen["available"]:
            fix = f"install a torch built for this driver; this one is {seen['torch']} for CUDA {seen['cuda']}"
            yield EvalCheck("problem", "torch.cuda.is_available() is False", fix)
            return
        if seen["devices"] != len(replica.placement):
            yield EvalCheck(
                "problem", f"torch sees {seen['devices']} GPUs of {replica.label}", "see `trainwright gpus`"
            )
            return
    yield EvalCheck("ok", f"torch {seen['torch']} sees {', '.join(replica.label for replica in spread.replicas)}")


def _model(asked: EvalConfig) -> Iterator[EvalCheck]:
    if ":" in asked.engine:
        return
    folder = Path(asked.model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            yield EvalCheck(
                "problem", f"{folder} has no config.json", "name the folder of a model, such as final_model"
            )
        elif not any(folder.glob("*.safetensors")):
            yield EvalCheck(
                "problem", f"{folder} has no .safetensors weights", "save the model with safe serialization"
            )
        else:
            try:
                read_model_config(folder / CONFIG)
                require_whole(folder)
            except UserError as error:
                yield EvalCheck("problem", "; ".join([error.message, *error.problems]), "; ".join(error.hints))
                return
            yield EvalCheck("ok", f"{folder} holds a model")
    elif asked.model.startswith(("/", "./", "../", "~")) or asked.model.count("/") > 1:
        yield EvalCheck("problem", f"there is no folder {asked.model}", "name a folder, or OWNER/NAME of the hub")

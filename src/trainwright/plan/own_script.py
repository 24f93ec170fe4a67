"""What a user's own script asks of a plan: how its processes are started, and what it can make use of."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.errors import UserError
from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device
from trainwright.hardware.reading import NotAvailable
from trainwright.job.placeholders import names_in, untold
from trainwright.job.schema import Job
from trainwright.plan.layout import Layout
from trainwright.plan.requirements import ranks_of

LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_INTERPRETERS = ("python", "python3")
_ZERO = ("zero1", "zero2", "zero3")
_NEEDED = {"model": "model.name", "data": "data.path", "eval_data": "data.eval_path"}


@dataclass(frozen=True)
class OwnScript:
    """The command of a job without its launcher, and how it is started.

    `command` starts with `python` where it names a Python script; `imports` are the top-level modules that the script
    imports, none where it cannot be read.
    """

    command: tuple[str, ...]
    launcher: Choice[str]
    imports: frozenset[str]

    @property
    def shown(self) -> str:
        """The script as people name it: `train.py`."""
        path = _script_path(self.command)
        return self.command[0] if path is None else path.name

    @property
    def why_one(self) -> str:
        """Why it is one process, where it is."""
        return "launcher=python is one process" if self.launcher.reason == "given" else self.launcher.reason

    @property
    def several(self) -> bool:
        """Whether it can be more than one process."""
        return self.launcher.value != "python"


def own_script(job: Job) -> OwnScript:
    """Return the command of a job and what starts it.

    Raises:
        UserError: a launcher with options of its own, which are the plan's; or two launchers; or nothing to start.
    """
    assert job.script is not None
    named, command = _without_launcher(job.script)
    if not command:
        raise UserError(f"script: `{' '.join(job.script)}` names no script", hints=["script: [python, train.py]"])
    if named is not None and job.launcher not in ("auto", named):
        raise UserError(
            f"script starts with `{named}`, and launcher={job.launcher}", hints=["leave `launcher` out of the job"]
        )
    if named is not None and command[0].startswith("-") and command[0] != "-m":
        raise UserError(
            f"script: `{command[0]}` is an option of {named}, and processes, nodes and files are the plan's to choose",
            hints=["leave it out", "resources.ranks, resources.strategy and resources.precision say the same"],
        )
    if named is not None or _is_python(command[0]):
        command = ["python", *command]
    imports = _imports(_script_path(command))
    return OwnScript(tuple(command), _launcher(job, named, command, imports), imports)


def _without_launcher(script: list[str]) -> tuple[str | None, list[str]]:
    program = Path(script[0]).name
    if script[:2] == ["accelerate", "launch"]:
        return "accelerate", script[2:]
    if program in ("torchrun", "deepspeed"):
        return program, script[1:]
    if script[:3] in (["python", "-m", "torch.distributed.run"], ["python", "-m", "torch.distributed.launch"]):
        return "torchrun", script[3:]
    return None, list(script)


def _is_python(element: str) -> bool:
    return element.endswith(".py")


def _launcher(job: Job, named: str | None, command: list[str], imports: frozenset[str]) -> Choice[str]:
    if named is not None:
        return Choice(named, "the command starts with it")
    if job.launcher != "auto":
        return Choice(job.launcher, "given")
    path = _script_path(command)
    if path is None:
        return Choice("python", f"`{command[0]}` is started as it is, as one process: it is no Python script")
    for module, launcher in (("accelerate", "accelerate"), ("deepspeed", "deepspeed")):
        if module in imports:
            return Choice(launcher, f"{path.name} imports {module}")
    if "transformers.Trainer" in imports:
        return Choice("accelerate", f"{path.name} imports transformers' Trainer, which is built on accelerate")
    if "torch.distributed" in imports:
        return Choice("torchrun", f"{path.name} imports torch.distributed")
    return Choice("python", f"{path.name} imports nothing that joins processes, so it is one")


def _script_path(command: list[str] | tuple[str, ...]) -> Path | None:
    """Return the Python file of `python [-u ...] train.py ...`, None for a module or another program."""
    if Path(command[0]).name not in _INTERPRETERS:
        return None
    for element in command[1:]:
        if element == "-m":
            return None
        if not element.startswith("-"):
            return Path(element)
    return None


def _imports(path: Path | None) -> frozenset[str]:
    """Return what a script imports, as written: `torch`, `torch.distributed`, `transformers.Trainer`."""
    try:
        tree = ast.parse(path.read_bytes()) if path is not None else ast.Module([], [])
    except (OSError, SyntaxError, ValueError, RecursionError):
        return frozenset()
    return frozenset(name for node in ast.walk(tree) for name in _imported(node))


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def require_values(job: Job) -> None:
    """Refuse a command that asks for a value the job does not have.

    Raises:
        UserError: all of them at once, with the key to set.
    """
    assert job.script is not None
    in_job = {"model": job.model.name, "data": job.data.path, "eval_data": job.data.eval_path}
    missing = [name for name, value in in_job.items() if value is None and name in names_in(job.script)]
    if missing:
        problems = [f"`{{{name}}}` is {_NEEDED[name]}, which the job does not set" for name in missing]
        raise UserError("the script is to be told what the job does not say", problems=problems)


@dataclass(frozen=True)
class Narrowed:
    """The job and the devices as a script can make use of them, with the reasons that differ from the planner's."""

    job: Job
    devices: tuple[Device, ...]
    choices: dict[str, Choice[Any]]
    warnings: tuple[str, ...]


def narrowed(job: Job, script: OwnScript, devices: tuple[Device, ...], *, may_leave_idle: bool) -> Narrowed:
    """Return what of a job's wishes its script can follow.

    Raises:
        UserError: it is one process, and several are asked for; or another strategy than its launcher's.
    """
    asked, launcher = job.resources.strategy, script.launcher.value
    choices: dict[str, Choice[Any]] = {"launcher": script.launcher}
    warnings: list[str] = []
    if not script.several:
        _require_one_process(job, script)
        if len(devices) > 1:
            warnings.append(f"1 of {len(devices)} GPUs is used: {script.why_one}")
            devices = devices if may_leave_idle else devices[:1]
        choices["resources.ranks"] = Choice(1, script.why_one)
        return Narrowed(_with_strategy(job, "single"), devices, choices, tuple(warnings))
    if launcher == "deepspeed" and asked not in ("auto", *_ZERO):
        raise UserError(
            f"resources.strategy={asked} is not DeepSpeed's, and the launcher is: {script.launcher.reason}",
            hints=["resources.strategy=zero2, or zero3 where the weights do not fit", "or launcher: torchrun"],
        )
    assert job.script is not None
    learns_strategy = names_in(job.script) & {"strategy", "deepspeed_config"}
    if asked != "auto" or launcher == "accelerate" or learns_strategy:
        return Narrowed(job, devices, choices, ())
    if launcher == "deepspeed":
        choices["resources.strategy"] = Choice("zero2", "the script is DeepSpeed's; zero3 where weights do not fit")
        return Narrowed(_with_strategy(job, "zero2"), devices, choices, ())
    alone = ranks_of(job, devices).value == 1
    strategy = "single" if alone else "ddp"
    reason = (
        "one process" if alone else f"{script.shown} is not told of a {{strategy}}, so it does its own: taken as ddp"
    )
    choices["resources.strategy"] = Choice(strategy, reason)
    return Narrowed(_with_strategy(job, strategy), devices, choices, ())


def _require_one_process(job: Job, script: OwnScript) -> None:
    resources = job.resources
    several = {
        "resources.ranks": resources.ranks not in ("auto", 1),
        "resources.gpus": isinstance(resources.gpus, int) and resources.gpus > 1,
        "resources.strategy": resources.strategy not in ("auto", "single"),
    }
    asked = [key for key, is_so in several.items() if is_so]
    problems = [f"{key}={getattr(resources, key.removeprefix('resources.'))} asks for several" for key in asked]
    if problems:
        raise UserError(
            f"the script is one process: {script.why_one}",
            problems=problems,
            hints=[f"launcher={name}, if that is what starts its processes" for name in ("torchrun", "accelerate")],
        )


def _with_strategy(job: Job, strategy: str) -> Job:
    return job.model_copy(update={"resources": job.resources.model_copy(update={"strategy": strategy})})


def warnings_of(job: Job, script: OwnScript, layout: Layout, *, estimated: bool) -> list[str]:
    """Return what a user should know of a plan for a script: what it is not told, and what the estimate leaves out."""
    assert job.script is not None
    found = []
    values = {
        "micro_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
    }
    untold_names = list(untold(job.script, [name for name, value in values.items() if value > 1]))
    if untold_names and "global_batch_size" not in names_in(job.script):
        told = " and ".join(f"{{{name}}}={values[name]}" for name in untold_names)
        found.append(f"{script.shown} is not told of {told}: its own batch is what it trains with")
    if estimated:
        found.append(
            f"the estimate is of a step as the built-in trainer makes it; what {script.shown} does besides is not in it"
        )
    return found


def trace_pointer(script: OwnScript, devices: tuple[Device, ...], ranks: int) -> str:
    """Return how the script's own first steps can be traced without a GPU, as the end of a sentence."""
    path, memory = _script_path(script.command), devices[0].memory_total_bytes
    if path is None or devices[0].kind != "cuda" or isinstance(memory, NotAvailable):
        return "set model.name for an estimate"
    request = {"script": [str(path)], "capacity_bytes": memory, "world_size": ranks}
    return (
        "set model.name for an estimate, or trace the script where torch is installed: "
        f"`python -m trainwright.estimate.trace.answer REQUEST.json` with {json.dumps(request)}"
    )

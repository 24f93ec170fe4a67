"""script.json: the command of a user's own script with its placeholders filled, and what starts it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trainwright.job.placeholders import filled
from trainwright.job.schema import Job
from trainwright.launch.files.accelerate import MULTI_NODE, SINGLE_NODE, accelerate_environment
from trainwright.launch.files.deepspeed import DEEPSPEED_ACCELERATE, DEEPSPEED_ENGINE, DEEPSPEED_TRAINER
from trainwright.launch.files.nodes import Nodes
from trainwright.launch.own_script.starting import BY_HAND, ScriptStart
from trainwright.plan.choose import Plan
from trainwright.plan.own_script import OwnScript, own_script
from trainwright.runs.folder import RunFolder


def script_values(
    job: Job, plan: Plan, script: OwnScript, files: Path, nodes: int, resume_from: Path | None
) -> dict[str, str | None]:
    """Return what stands in the place of every placeholder, None where there is nothing to say.

    `files` is the folder with accelerate's and DeepSpeed's.
    """
    layout, train = plan.layout, job.train
    zero = layout.strategy.startswith("zero")
    values: dict[str, Any] = {
        "name": job.name,
        "output_dir": RunFolder(Path(job.output_dir) / job.name).output_dir,
        "resume_from": resume_from,
        "model": job.model.name,
        "data": job.data.path,
        "eval_data": job.data.eval_path,
        "max_length": job.data.max_length,
        "ranks": layout.ranks,
        "micro_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "global_batch_size": layout.global_batch_size,
        "eval_batch_size": layout.eval_batch_size,
        "learning_rate": plan.learning_rate,
        "num_train_epochs": train.num_train_epochs,
        "max_steps": train.max_steps,
        "warmup_steps": train.warmup_steps,
        "weight_decay": train.weight_decay,
        "seed": train.seed,
        "precision": layout.precision,
        "strategy": layout.strategy,
        "gradient_checkpointing": layout.gradient_checkpointing,
        "accelerate_config": accelerate_config(files, nodes),
        "deepspeed_config": files / deepspeed_file(script) if zero else None,
    }
    return {name: None if value is None else _argument(value) for name, value in values.items()}


def accelerate_config(files: Path, nodes: int) -> Path:
    """Return the path of accelerate's file."""
    return files / (SINGLE_NODE if nodes == 1 else MULTI_NODE)


def deepspeed_file(script: OwnScript) -> str:
    """Return which DeepSpeed file a script can read: only transformers' Trainer fills in what is `auto`."""
    return DEEPSPEED_TRAINER if "transformers.Trainer" in script.imports else DEEPSPEED_ENGINE


def _argument(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def script_start(
    job: Job,
    plan: Plan,
    files: Path,
    *,
    nodes: int = 1,
    attempt: int = BY_HAND,
    resume_from: Path | None = None,
) -> ScriptStart:
    """Return what an attempt runs, from the folder that this process is in.

    On several nodes torchrun starts the ranks of an accelerate script too, with what accelerate would tell them.
    """
    script, layout = own_script(job), plan.layout
    environment = {"ACCELERATE_USE_CPU": "true"} if layout.device == "cpu" else {}
    if nodes > 1 and script.launcher.value == "accelerate":
        each = Nodes(nodes, layout.ranks // nodes)
        environment = accelerate_environment(layout, each, files / DEEPSPEED_ACCELERATE)
    return ScriptStart(
        attempt=attempt,
        run_dir=str(RunFolder(Path(job.output_dir) / job.name).path),
        command=script_command(script, script_values(job, plan, script, files, nodes, resume_from)),
        launcher=script.launcher.value,
        working_directory=str(Path.cwd()),
        nodes=nodes,
        ranks_per_node=layout.ranks // nodes,
        device=layout.device,
        accelerate_config=str(accelerate_config(files, nodes)),
        environment=environment,
    )


def script_command(script: OwnScript, values: dict[str, str | None]) -> tuple[str, ...]:
    """Return the command that each rank runs, `python` being the interpreter that runs this program."""
    command = filled(script.command, values)
    if command[0] in ("python", "python3"):
        command[0] = sys.executable
    return tuple(command)

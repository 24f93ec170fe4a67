"""What a job must bring before anything is planned or run; each refusal says what to change."""

from __future__ import annotations

from pathlib import Path

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device
from trainwright.job.schema import PLANNED_TASKS, Job
from trainwright.plan.job_model import is_folder_name, no_model


def require_runnable(job: Job) -> None:
    """Refuse a job that can be planned and not run: a task of a later version, no data, or no such model.

    A script of the user's own brings both.

    Raises:
        UserError: with what to set instead.
    """
    if job.script is not None:
        return
    if job.task in PLANNED_TASKS:
        raise UserError(
            f"the task `{job.task}` is not part of this version yet; its job file can be planned but not run",
            hints=["for text, set task=causal-lm or task=seq2seq", "or task=module:Class for a task of your own"],
            exit_code=ExitCode.MISSING,
        )
    if job.data.path is None:
        raise UserError("no training data is named", hints=["data.path=train.jsonl, or a line `path:` under `data:`"])
    name = job.model.name
    if name is not None and is_folder_name(name) and not Path(name).expanduser().is_dir():
        raise no_model(name)


def require_base_for_adapters(job: Job) -> None:
    """Refuse adapters without a saved model below them.

    Raises:
        UserError: with the way to make one.
    """
    method = job.method.type
    if job.model.from_scratch is None or method == "full":
        return
    without = "packs a saved model in 4 bits" if method == "qlora" else "leaves adapters beside a saved model"
    raise UserError(
        f"method.type={method} {without}, and model.from_scratch has none",
        hints=["train it first with method.type=full, then set model.name to the final_model of that run"],
    )


def require_optimizer_fits(job: Job, strategy: str, kind: str) -> None:
    """Refuse an optimizer that would learn otherwise under a strategy, or does not run on a device.

    Raises:
        UserError: with the alternatives.
    """
    optim = job.train.optim
    if optim == "adafactor" and strategy.startswith(("zero", "fsdp")):
        raise UserError(
            f"train.optim=adafactor factors whole matrices, and {strategy} cuts them: it would learn otherwise",
            hints=["train.optim=adamw", "or resources.strategy=ddp"],
        )
    if optim == "adamw_8bit" and (strategy.startswith(("zero", "fsdp")) or kind != "cuda"):
        raise UserError(
            f"train.optim=adamw_8bit runs on CUDA, alone or under ddp; this is {strategy} on {kind}",
            hints=["train.optim=adamw"],
        )


def ranks_of(job: Job, devices: tuple[Device, ...]) -> Choice[int]:
    """Return the number of processes for exactly these devices.

    Raises:
        UserError: another number was asked for than there are GPUs.
    """
    asked, kind = job.resources.ranks, devices[0].kind
    if kind == "cpu":
        return Choice(1, "one process uses all cores") if asked == "auto" else Choice(asked, "given")
    if asked == "auto" or asked == len(devices):
        return Choice(len(devices), "one process a GPU")
    raise UserError(
        f"resources.ranks={asked}, but the devices chosen are {len(devices)} {kind}: one process a GPU",
        hints=[f"choose {asked} of them: --gpus 0,1,...", "or leave out resources.ranks"],
    )


def device_reason(job: Job, kind: str) -> str:
    """Return why this kind of device is used."""
    if job.resources.device != "auto":
        return "given"
    return {"cuda": "an NVIDIA GPU is there", "mps": "an Apple GPU is there", "cpu": "no GPU is there"}[kind]

"""The plan: the layout for a Job on the devices there are, each choice with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device
from trainwright.hardware.local import cuda_environment
from trainwright.hardware.precision import choose_precision
from trainwright.job.schedule import effective_batch, learning_rate_advice, scaled_learning_rate
from trainwright.job.schema import PLANNED_TASKS, Job
from trainwright.plan.layout import Layout

LARGEST_UNPREDICTED_MICRO_BATCH = 8
EVAL_FACTOR = 3
"""Evaluation keeps no gradients, so it takes three times the micro-batch (S2-22)."""


@dataclass(frozen=True)
class Plan:
    """The layout chosen, the reason of each choice, and advice; `learning_rate` is the peak after any scaling."""

    layout: Layout
    learning_rate: float
    choices: dict[str, Choice[Any]]
    warnings: tuple[str, ...]
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data, the same bytes for the same job and devices."""
        return {
            "schema_version": 1,
            "layout": dataclasses.asdict(self.layout),
            "learning_rate": self.learning_rate,
            "choices": {key: {"value": c.value, "reason": c.reason} for key, c in sorted(self.choices.items())},
            "warnings": list(self.warnings),
            "advice": list(self.advice),
        }


def choose(job: Job, given: Collection[str], devices: tuple[Device, ...]) -> tuple[Job, Plan]:
    """Return the job with its global batch settled, and the plan for `devices`, which are of one kind.

    `given` are the keys that the user wrote, dotted.

    Raises:
        UserError: the job cannot run on these devices; all contradictions at once.
    """
    _require_available_task(job)
    _require_base_for_adapters(job)
    kind = devices[0].kind
    ranks = _ranks(job, devices)
    strategy = _strategy(job, ranks.value)
    _require_optimizer_fits(job, strategy.value, kind)
    precisions = [choose_precision(device, job.resources.precision) for device in devices]
    precision = min(precisions, key=lambda choice: ("fp32", "fp16", "bf16").index(choice.value))
    job, batch = _batch(job, given, ranks.value)
    micro = batch["train.micro_batch_size"].value
    asked = job.eval.batch_size
    evaluation = (
        Choice(EVAL_FACTOR * micro, f"{EVAL_FACTOR} x micro-batch, as evaluation keeps no gradients")
        if asked == "auto"
        else Choice(asked, "given")
    )
    checkpointing = _checkpointing(job, kind)
    layout = Layout(
        device=kind,
        visible_devices=cuda_environment(devices)["CUDA_VISIBLE_DEVICES"] if kind == "cuda" else None,
        ranks=ranks.value,
        strategy=strategy.value,
        precision=precision.value,
        offload=job.resources.offload,
        global_batch_size=job.train.global_batch_size,
        micro_batch_size=micro,
        gradient_accumulation_steps=batch["train.gradient_accumulation_steps"].value,
        eval_batch_size=evaluation.value,
        gradient_checkpointing=checkpointing.value,
    )
    choices: dict[str, Choice[Any]] = {
        "resources.device": Choice(kind, _device_reason(job, kind)),
        "resources.ranks": ranks,
        "resources.strategy": strategy,
        "resources.precision": Choice(precision.value, precision.reason),
        "eval.batch_size": evaluation,
        "train.gradient_checkpointing": checkpointing,
        **batch,
    }
    train = job.train
    rate = train.learning_rate
    base = train.lr_scaling_base
    if train.lr_scaling != "none":
        assert base is not None
        rate = scaled_learning_rate(rate, base, train.global_batch_size, train.lr_scaling)
    advice = learning_rate_advice(train.learning_rate, base, train.global_batch_size, train.lr_scaling)
    warnings = [precision.warning] if precision.warning else []
    return job, Plan(layout, rate, choices, tuple(warnings), tuple(advice))


def deepspeed_config(job: Job, layout: Layout) -> dict[str, Any]:
    """Return the DeepSpeed file of a layout; stage, precision and offload follow it, never a shipped default."""
    zero: dict[str, Any] = {
        "stage": int(layout.strategy.removeprefix("zero")),
        "overlap_comm": layout.device == "cuda",
        "contiguous_gradients": True,
        "reduce_bucket_size": 200_000_000,
        "allgather_bucket_size": 200_000_000,
    }
    pinned = {"device": "cpu", "pin_memory": layout.device == "cuda"}
    if layout.offload != "none":
        zero["offload_optimizer"] = pinned
    if layout.offload == "optimizer+parameters":
        zero["offload_param"] = pinned
    return {
        "train_batch_size": effective_batch(layout.micro_batch_size, layout.gradient_accumulation_steps, layout.ranks),
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "gradient_clipping": job.train.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": layout.precision == "bf16"},
        "fp16": {"enabled": layout.precision == "fp16"},
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def _require_available_task(job: Job) -> None:
    if job.task in PLANNED_TASKS:
        raise UserError(
            f"the task `{job.task}` is not part of this version yet; its job file can be read but not run",
            hints=["for text, set task=causal-lm or task=seq2seq", "or task=module:Class for a task of your own"],
            exit_code=ExitCode.MISSING,
        )
    if job.data.path is None:
        raise UserError("no training data is named", hints=["data.path=train.jsonl, or a line `path:` under `data:`"])


def _require_base_for_adapters(job: Job) -> None:
    method = job.method.type
    if job.model.from_scratch is None or method == "full":
        return
    without = "packs a saved model in 4 bits" if method == "qlora" else "leaves adapters beside a saved model"
    raise UserError(
        f"method.type={method} {without}, and model.from_scratch has none",
        hints=["train it first with method.type=full, then set model.name to the final_model of that run"],
    )


def _ranks(job: Job, devices: tuple[Device, ...]) -> Choice[int]:
    asked, kind = job.resources.ranks, devices[0].kind
    if kind == "cpu":
        return Choice(1, "one process uses all cores") if asked == "auto" else Choice(asked, "given")
    if asked == "auto" or asked == len(devices):
        return Choice(len(devices), "one process a GPU")
    raise UserError(
        f"resources.ranks={asked}, but the devices chosen are {len(devices)} {kind}: one process a GPU",
        hints=[f"choose {asked} of them: --gpus 0,1,...", "or leave out resources.ranks"],
    )


def _strategy(job: Job, ranks: int) -> Choice[str]:
    asked = job.resources.strategy
    if asked != "auto":
        return Choice(asked, "given")
    if job.resources.offload != "none":
        return Choice("zero3", f"resources.offload={job.resources.offload} is done by ZeRO")
    if ranks == 1:
        return Choice("single", "one rank")
    return Choice("ddp", f"{ranks} ranks with the whole model on each; fsdp2 or zero3 where it does not fit")


def _require_optimizer_fits(job: Job, strategy: str, kind: str) -> None:
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


def _batch(job: Job, given: Collection[str], ranks: int) -> tuple[Job, dict[str, Choice[Any]]]:
    train = job.train
    micro, accumulation, total = train.micro_batch_size, train.gradient_accumulation_steps, train.global_batch_size
    if micro != "auto" and accumulation != "auto" and "train.global_batch_size" not in given:
        total = effective_batch(micro, accumulation, ranks)
        job = job.model_copy(update={"train": train.model_copy(update={"global_batch_size": total})})
        whole = Choice(total, f"micro-batch x accumulation x ranks = {micro} x {accumulation} x {ranks}")
    else:
        whole = Choice(total, "given" if "train.global_batch_size" in given else "default")
    share = -(-total // ranks)
    if micro != "auto":
        chosen = Choice(micro, "given")
    elif accumulation != "auto":
        chosen = Choice(-(-share // accumulation), f"{total} samples over {ranks} ranks in {accumulation} micro-steps")
    else:
        steps = -(-share // LARGEST_UNPREDICTED_MICRO_BATCH)
        chosen = Choice(
            -(-share // steps),
            f"{total} samples over {ranks} ranks in {steps} micro-steps of {LARGEST_UNPREDICTED_MICRO_BATCH} at most; "
            "memory is not predicted in this version",
        )
    steps = -(-total // (chosen.value * ranks))
    if accumulation == "auto":
        follows = Choice(steps, f"{total} samples / ({chosen.value} x {ranks} ranks)")
    else:
        follows = Choice(accumulation, "given")
    return job, {
        "train.global_batch_size": whole,
        "train.micro_batch_size": chosen,
        "train.gradient_accumulation_steps": follows,
    }


def _checkpointing(job: Job, kind: str) -> Choice[bool]:
    asked = job.train.gradient_checkpointing
    if asked != "auto":
        return Choice(asked, "given")
    if kind == "cpu":
        return Choice(False, "host memory is not the limit of a CPU run")
    return Choice(True, "saves memory at a third more compute; memory is not predicted in this version")


def _device_reason(job: Job, kind: str) -> str:
    if job.resources.device != "auto":
        return "given"
    return {"cuda": "an NVIDIA GPU is there", "mps": "an Apple GPU is there", "cpu": "no GPU is there"}[kind]

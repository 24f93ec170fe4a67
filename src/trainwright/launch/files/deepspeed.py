"""DeepSpeed's configuration: with the plan's numbers for the engine, with `auto` for the user's own scripts.

Both follow the layout: stage, precision and offload are never those of a shipped file (T-01, T-03, X-04).
"""

from __future__ import annotations

from typing import Any

from trainwright.job.schedule import effective_batch
from trainwright.job.schema import Job
from trainwright.plan.layout import Layout

DEEPSPEED_TRAINER = "deepspeed.json"
DEEPSPEED_ACCELERATE = "deepspeed_accelerate.json"
DEEPSPEED_ENGINE = "deepspeed_engine.json"

BUCKET_ELEMENTS = 200_000_000
"""Elements that are reduced or gathered at once (S4-26)."""

AUTO = "auto"
"""Filled in by transformers' Trainer, and as far as it can by accelerate; DeepSpeed itself does not know it."""


def engine_config(job: Job, layout: Layout) -> dict[str, Any]:
    """Return the file for what calls `deepspeed.initialize` with an optimizer of its own, as the workers do."""
    return {
        "train_batch_size": effective_batch(layout.micro_batch_size, layout.gradient_accumulation_steps, layout.ranks),
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "gradient_clipping": job.train.max_grad_norm,
        "zero_optimization": _zero(layout),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **_precision(layout),
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def accelerate_config(job: Job, layout: Layout) -> dict[str, Any]:
    """Return the file for a script that brings its own optimizer and schedule to `Accelerator.prepare`.

    accelerate refuses such a script when the file names an optimizer or a scheduler too.
    """
    zero = _zero(layout)
    if layout.strategy == "zero3":
        # S0-43; what is `auto` follows the model's hidden size.
        zero |= {
            "sub_group_size": 1_000_000_000,
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": job.train.max_grad_norm,
        "zero_optimization": zero,
        **_precision(layout),
        "steps_per_print": 50,
    }


def trainer_config(job: Job, layout: Layout) -> dict[str, Any]:
    """Return the file for transformers' `TrainingArguments(deepspeed=...)`, whose keys S4-25 to S4-29 list.

    DeepSpeed then makes optimizer and warm-up itself, from the Trainer's arguments.
    """
    adamw = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)
    warm_up = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO)
    return {
        **accelerate_config(job, layout),
        "optimizer": {"type": "AdamW", "params": adamw},
        "scheduler": {"type": "WarmupLR", "params": warm_up},
    }


def _zero(layout: Layout) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": int(layout.strategy.removeprefix("zero")),
        "allgather_partitions": True,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        "reduce_scatter": True,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "overlap_comm": layout.device == "cuda",
        "contiguous_gradients": True,
    }
    in_host_memory = {"device": "cpu", "pin_memory": layout.device == "cuda"}
    if layout.offload != "none":
        zero["offload_optimizer"] = in_host_memory
    if layout.offload == "optimizer+parameters":
        zero["offload_param"] = in_host_memory
    return zero


def _precision(layout: Layout) -> dict[str, Any]:
    return {name: {"enabled": layout.precision == name} for name in ("bf16", "fp16")}

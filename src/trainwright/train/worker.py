"""One rank of a run, from start to end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainwright.errors import ExitCode, UserError
from trainwright.framework_imports import collector_at_rest
from trainwright.job.batch_schedule import BatchSchedule
from trainwright.job.learning_rate import LearningRate
from trainwright.job.schema import Job
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append
from trainwright.runs.storage import require_free_space
from trainwright.runs.writing import read_json, write_json_atomic
from trainwright.train.assignment import Assignment, require_same_global_batch
from trainwright.train.balance import Balance
from trainwright.train.console import environment_lines, model_lines, say
from trainwright.train.cutting.split import Split
from trainwright.train.data.dataset import TokenDataset
from trainwright.train.data.leakage import assert_no_leakage
from trainwright.train.export import export_final_model
from trainwright.train.heartbeat import Heartbeat
from trainwright.train.loop import StepLoop
from trainwright.train.measuring import Measuring
from trainwright.train.memory import RunningOut
from trainwright.train.models import ParameterCount, build_model, count_parameters, enable_gradient_checkpointing
from trainwright.train.precision import autocast
from trainwright.train.probing import probe
from trainwright.train.ranks import Ranks, open_group
from trainwright.train.saving import Restored, load_checkpoint
from trainwright.train.step_timer import Sections
from trainwright.train.stopping import StopRequest
from trainwright.train.stopwatch import Stopwatch
from trainwright.train.strategies.handing_out import own_rows_only
from trainwright.train.strategies.protocol import Strategy
from trainwright.train.tasks import load_task
from trainwright.train.tasks.protocol import use_config
from trainwright.train.tracking import Tracking


def run_rank(run_dir: Path, stop: StopRequest) -> ExitCode:
    """Train as this rank of the run in `run_dir`; return DONE, or STOPPED after a clean stop.

    Raises:
        UserError: whatever the user can mend; nothing of the run folder is lost.
    """
    folder = RunFolder(run_dir)
    job = Job.model_validate(read_json(folder.resolved_json))
    plan, prepared = read_json(folder.plan_json), read_json(folder.prepared_json)
    if prepared["model_commit"] is not None:
        # The hub may have a newer one by now; a run goes on with the base that it began with.
        pinned = job.model.model_copy(update={"revision": prepared["model_commit"]})
        job = job.model_copy(update={"model": pinned})
    require_same_global_batch(job, plan["layout"])
    assignment = Assignment.from_environment(plan["layout"])
    start = read_json(folder.attempt_dir(assignment.attempt) / "start.json")
    device = open_device(assignment)
    ranks = open_group(
        rank=assignment.rank,
        world_size=assignment.world_size,
        device=device,
        meeting_file=folder.attempt_dir(assignment.attempt) / "meeting.json",
        hang_timeout_s=job.resources.hang_timeout_s,
    )
    sections = Sections(device)
    try:
        with Heartbeat(folder, assignment, device, sections):
            return _train(folder, job, plan, prepared, start, assignment, ranks, stop, sections)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def open_device(assignment: Assignment) -> torch.device:
    """Return this rank's device, made current."""
    if assignment.device == "cuda":
        if torch.cuda.device_count() <= assignment.local_rank:
            raise UserError(
                f"rank {assignment.rank} needs GPU {assignment.local_rank}, torch sees {torch.cuda.device_count()}",
                hints=["compare `nvidia-smi` with CUDA_VISIBLE_DEVICES", "install a torch build for this CUDA driver"],
                exit_code=ExitCode.MISSING,
            )
        torch.cuda.set_device(assignment.local_rank)
        return torch.device("cuda", assignment.local_rank)
    return torch.device(assignment.device)


def _train(
    folder: RunFolder,
    job: Job,
    plan: dict[str, Any],
    prepared: dict[str, Any],
    start: dict[str, Any],
    assignment: Assignment,
    ranks: Ranks,
    stop: StopRequest,
    sections: Sections,
) -> ExitCode:
    with collector_at_rest():
        import transformers.modeling_utils  # noqa: F401 - every model needs it, and it is what takes the time
        from transformers import AutoTokenizer

    if ranks.is_first:
        for line in environment_lines(ranks):
            say(line)
    tokenizer = AutoTokenizer.from_pretrained(prepared["tokenizer_dir"], trust_remote_code=False)
    task = load_task(job, tokenizer)
    train_data = TokenDataset(Path(prepared["train"]["cache"]))
    eval_data = TokenDataset(Path(prepared["eval"]["cache"])) if prepared["eval"] else None
    course = BatchSchedule.of(job.train, samples=len(train_data))
    curve = LearningRate.of(job.train, peak=plan["learning_rate"], total_samples=course.total_samples)

    with RunningOut("starting", ranks.device):
        model = build_assigned(job, task.auto_model_class(), tokenizer, assignment, ranks)
        use_config(task, model.config.to_dict())
        count = count_parameters(model)
        strategy = hand_to_strategy(model, job, assignment, ranks, folder)
        found = _require_as_planned(strategy, assignment, ranks)
        if job.data.packing:
            with autocast(ranks.device, assignment.precision):
                assert_no_leakage(strategy.forward, task, ranks.device)
        restored = Restored()
        if start["resume_from"] is not None:
            restored = load_checkpoint(Path(start["resume_from"]), strategy)
    position = restored.position
    sections.step, sections.total_steps = position.step, course.total_steps_from(position)
    loop = StepLoop(
        job=job,
        folder=folder,
        assignment=assignment,
        ranks=ranks,
        stop=stop,
        task=task,
        strategy=strategy,
        train_data=train_data,
        eval_data=eval_data,
        course=course,
        curve=curve,
        contract=start["contract"],
        tracking=None,
        measuring=Measuring(ranks.device),
        sections=sections,
        balance=_balance(job, assignment, ranks, strategy, restored),
        position=position,
        best=restored.best,
        eval_due=restored.eval_due,
    )
    if "probe" in start:
        probe(loop, start["probe"])
        return ExitCode.DONE
    if ranks.is_first:
        _begin_records(loop, count, found)
    finished = loop.run()
    _record_end(loop, finished)
    if not finished:
        if ranks.is_first:
            say(f"stopped at step {loop.position.step:,}, saved; run the same command to go on")
        return ExitCode.STOPPED
    template = prepared["template"]
    if template is not None and "chat_template" in template:
        tokenizer.chat_template = template["chat_template"]  # as it was trained, so the model is to be asked
    _export(loop, tokenizer)
    return ExitCode.DONE


def _begin_records(loop: StepLoop, count: ParameterCount, found: dict[str, str]) -> None:
    """Say what is about to run, write it down, and track it from here on; on rank 0."""
    job, folder, assignment, step = loop.job, loop.folder, loop.assignment, loop.position.step
    require_free_space(folder.path, 2 * checkpoint_bytes(job, count), "two checkpoints (the old one goes last)")
    for line in model_lines(count, assignment, job.train.global_batch_size):
        say(line)
    say(
        f"Course: {len(loop.train_data):,} samples, {loop.course.steps_per_epoch:,} steps an epoch, "
        f"{loop.sections.total_steps:,} steps in all; from step {step:,}"
    )
    loop.tracking = Tracking(job, folder, attempt=assignment.attempt, resumed_step=step)
    append(folder.events_jsonl, {"event": "started", "attempt": assignment.attempt, "step": step, **found})
    write_json_atomic(
        folder.training_config_json, training_config(job, count, assignment, loop.ranks, found, loop.curve.peak)
    )


def _record_end(loop: StepLoop, finished: bool) -> None:
    """Write down what every rank measured, and how the attempt ended."""
    measured = loop.ranks.gather(loop.measuring.figures())
    if not loop.ranks.is_first:
        return
    events, attempt = loop.folder.events_jsonl, loop.assignment.attempt
    for rank, figures in enumerate(measured):
        if figures is not None:
            append(events, {"event": "measured", "attempt": attempt, "rank": rank, **figures})
    event = {"event": "finished" if finished else "stopped", "time_s": time.time()}
    append(events, event | {"attempt": attempt, "step": loop.position.step})


def _export(loop: StepLoop, tokenizer: Any) -> None:
    folder, position = loop.folder, loop.position
    record = {
        "run_id": folder.run_id,
        "step": position.step,
        "samples_seen": position.samples_seen,
        "best": loop.best and {"step": loop.best.step, "eval_loss": loop.best.eval_loss},
        "contract": loop.contract,
    }
    with loop.sections.within("save"), RunningOut("saving", loop.ranks.device):
        path = export_final_model(
            folder,
            loop.job,
            loop.strategy,
            loop.ranks,
            tokenizer,
            auto_class=loop.task.auto_model_class(),
            attempt=loop.assignment.attempt,
            record=record,
        )
    if loop.ranks.is_first:
        say(f"finished: {path}")


def build_assigned(job: Job, auto_class: str, tokenizer: Any, assignment: Assignment, ranks: Ranks) -> nn.Module:
    """Build the model as the plan has it, on the host; under FSDP2 and ZeRO only rank 0 holds the weights at first.

    A base that is packed in 4 bits is the exception: every rank packs what it reads, weight by weight on its device,
    and keeps its own rows alone under FSDP2.
    """
    shared = assignment.strategy == "fsdp2" or assignment.strategy.startswith("zero")
    packed = job.method.type == "qlora"
    cuts = packed and assignment.strategy == "fsdp2"
    model = build_model(
        job,
        auto_class=auto_class,
        tokenizer=tokenizer,
        precision=assignment.precision,
        on_meta=shared and not packed and not ranks.is_first,
        loading=own_rows_only(ranks.rank, ranks.world_size) if cuts else None,
    )
    if assignment.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model.train()


def hand_to_strategy(model: nn.Module, job: Job, assignment: Assignment, ranks: Ranks, folder: RunFolder) -> Strategy:
    """Let the strategy of the plan take the model to this rank's device."""
    device, train = ranks.device, job.train
    if assignment.strategy == "fsdp2":
        from trainwright.train.strategies.fsdp2 import FullySharded

        return FullySharded(
            model,
            train,
            device=device,
            precision=assignment.precision,
            sync_each_micro_batch=assignment.sync_each_micro_batch,
        )
    if assignment.strategy.startswith("zero"):
        from trainwright.train.strategies.zero import Zero

        config = read_json(folder.deepspeed_json)
        return Zero(model, train, device=device, config=config)
    from trainwright.train.strategies.replicated import Replicated

    fp16 = assignment.precision == "fp16"
    return Replicated(model, train, device=device, name=assignment.strategy, fp16=fp16)


def _balance(job: Job, assignment: Assignment, ranks: Ranks, strategy: Strategy, restored: Restored) -> Balance:
    """Return who computes what from here on: as the checkpoint says, if it is one of as many ranks; else as planned."""
    split = assignment.split(job.train.global_batch_size)
    if job.resources.balance == "off" or ranks.world_size == 1:
        return Balance(split, ranks, None, settled=True)
    measured = restored.rank_samples
    settled = len(measured) == ranks.world_size and sum(measured) == sum(split.weights)
    if settled:
        split = Split(measured, split.at_once)
    stopwatch = Stopwatch(strategy.module, ranks.device, gathers_inside_blocks=strategy.name == "zero3")
    return Balance(split, ranks, stopwatch, settled=settled)


def _require_as_planned(strategy: Strategy, assignment: Assignment, ranks: Ranks) -> dict[str, str]:
    """Return what is found in the running process; UserError if it is not what the plan says."""
    trained = {str(p.dtype).removeprefix("torch.") for p in strategy.module.parameters() if p.requires_grad}
    found = {
        **strategy.found(),
        "world_size": str(dist.get_world_size() if dist.is_initialized() else 1),
        "device": ranks.device.type,
        "backend": ranks.backend,
        "trained_dtype": "+".join(sorted(trained)),
        "precision": assignment.precision,
    }
    planned = {
        "strategy": assignment.strategy,
        "world_size": str(assignment.world_size),
        "device": assignment.device,
    }
    problems = [f"{key}: planned {value}, found {found[key]}" for key, value in planned.items() if found[key] != value]
    if problems:
        raise UserError("what runs is not what was planned", problems=problems, exit_code=ExitCode.FAILED)
    if ranks.is_first:
        say("Running: " + ", ".join(f"{key} {value}" for key, value in found.items()))
    return found


def checkpoint_bytes(job: Job, count: ParameterCount) -> int:
    """Return the size of a checkpoint: weights (the adapters alone under lora) and two moments, in fp32.

    An upper bound for Adafactor and 8-bit AdamW, whose states are smaller.
    """
    saved = count.total if job.method.type == "full" else count.trainable
    return 4 * saved + 8 * count.trainable


def training_config(
    job: Job,
    count: ParameterCount,
    assignment: Assignment,
    ranks: Ranks,
    found: dict[str, str],
    learning_rate: float,
) -> dict[str, Any]:
    """Return what really runs, in the shape that the guides' own record has."""
    cuda = ranks.device.type == "cuda"
    lora = {"r": job.method.r, "alpha": job.method.alpha, "dropout": job.method.dropout}
    return {
        "config_name": job.name,
        "description": job.description,
        "method": job.method.type,
        "lora": lora if job.method.type != "full" else None,
        "total_params": count.total,
        "trainable_params": count.trainable,
        "training_args": {
            "epochs": job.train.num_train_epochs,
            "max_steps": job.train.max_steps,
            "batch": assignment.micro_batch_size,
            "accumulation": assignment.gradient_accumulation_steps,
            "sync_each_micro_batch": assignment.sync_each_micro_batch,
            "lr": learning_rate,
            "effective_batch_size": job.train.global_batch_size,
            "num_gpus": assignment.world_size if cuda else 0,
            "precision": assignment.precision,
        },
        "found": found,
        "hardware": {
            "cuda_version": torch.version.cuda,
            "num_gpus": assignment.world_size if cuda else 0,
            "gpu_names": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
            if cuda
            else [],
        },
    }

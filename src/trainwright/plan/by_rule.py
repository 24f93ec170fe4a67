"""A layout without an estimate: for a model whose memory is not known, and for the CPU, whose limit is not a GPU's."""

from __future__ import annotations

import math
from typing import Any

from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device
from trainwright.hardware.reading import GIB, NotAvailable
from trainwright.job.schedule import effective_batch
from trainwright.job.schema import Job
from trainwright.plan.layout import Layout
from trainwright.plan.options import Sharing, global_batch
from trainwright.plan.requirements import ranks_of, require_optimizer_fits
from trainwright.plan.search import EVAL_FACTOR, visible_devices, weakest_precision

LARGEST_MICRO_BATCH = 8
"""Without an estimate a rank takes no more samples at once."""
SMALL_CARD_GIB = 32
"""FramerTurbo shards the weights too where a card has this much or is a V100 (S0-13)."""

Choices = dict[str, Choice[Any]]


def layout_by_rule(
    job: Job, given: frozenset[str], devices: tuple[Device, ...], why: str, sharing: Sharing | None = None
) -> tuple[Layout, Choices]:
    """Return the layout that usual practice gives, each choice with its reason; `why` there is no estimate.

    `sharing` is how the ranks share the work, where that is settled.

    Raises:
        UserError: the job contradicts itself or the devices.
    """
    kind = devices[0].kind
    ranks = ranks_of(job, devices)
    strategy = _strategy(job, ranks.value, devices)
    if sharing is not None and sharing.strategy != strategy.value:
        strategy = Choice(sharing.strategy, "the model's size")
    require_optimizer_fits(job, strategy.value, kind)
    precision = weakest_precision(job, devices)
    batch = _batch(job, given, ranks.value, why)
    micro = batch["train.micro_batch_size"].value
    asked = job.eval.batch_size
    evaluation = (
        Choice(EVAL_FACTOR * micro, f"{EVAL_FACTOR} x micro-batch, as evaluation keeps no gradients")
        if asked == "auto"
        else Choice(asked, "given")
    )
    checkpointing = _checkpointing(job, kind, why)
    accumulates = batch["train.gradient_accumulation_steps"].value > 1
    reduced = _reduced(job, why) if strategy.value == "fsdp2" and accumulates else None
    layout = Layout(
        device=kind,
        visible_devices=visible_devices(devices),
        ranks=ranks.value,
        strategy=strategy.value,
        precision=precision.value,
        offload=job.resources.offload if sharing is None else sharing.offload,
        global_batch_size=batch["train.global_batch_size"].value,
        micro_batch_size=micro,
        gradient_accumulation_steps=batch["train.gradient_accumulation_steps"].value,
        eval_batch_size=evaluation.value,
        gradient_checkpointing=checkpointing.value,
        sync_each_micro_batch=reduced is not None and reduced.value,
    )
    return layout, {
        "resources.ranks": ranks,
        "resources.strategy": strategy,
        "eval.batch_size": evaluation,
        "train.gradient_checkpointing": checkpointing,
        **({} if reduced is None else {"train.sync_each_micro_batch": reduced}),
        **batch,
    }


def _strategy(job: Job, ranks: int, devices: tuple[Device, ...]) -> Choice[str]:
    asked = job.resources.strategy
    if asked != "auto":
        return Choice(asked, "given")
    if job.task == "framer-lora":
        return framer_stage(devices)
    if job.resources.offload != "none":
        return Choice("zero3", f"resources.offload={job.resources.offload} is done by ZeRO")
    if ranks == 1:
        return Choice("single", "one rank")
    return Choice("ddp", f"{ranks} ranks with the whole model on each, if it fits; else fsdp2 or zero3")


def framer_stage(devices: tuple[Device, ...]) -> Choice[str]:
    """Return the ZeRO stage that the FramerTurbo guide takes on these GPUs (S0-13, S0-31)."""
    if any("V100" in device.name for device in devices):
        return Choice("zero3", "a V100 is among the GPUs (the guide's rule)")
    sizes = [device.memory_total_bytes for device in devices]
    if any(not isinstance(size, NotAvailable) and round(size / GIB) <= SMALL_CARD_GIB for size in sizes):
        return Choice("zero3", f"a GPU has {SMALL_CARD_GIB} GiB or less (the guide's rule)")
    return Choice("zero2", "faster, and enough for GPUs of 40 GiB and more (the guide's rule)")


def _batch(job: Job, given: frozenset[str], ranks: int, why: str) -> Choices:
    train = job.train
    micro, accumulation = train.micro_batch_size, train.gradient_accumulation_steps
    total = global_batch(job, given, ranks)
    whole = total_choice(job, given, total, ranks)
    share = math.ceil(total / ranks)
    if micro != "auto":
        chosen = Choice(micro, "given")
    elif accumulation != "auto":
        chosen = Choice(math.ceil(share / accumulation), f"{total} samples over {ranks} ranks, {accumulation} times")
    else:
        steps = math.ceil(share / LARGEST_MICRO_BATCH)
        chosen = Choice(
            math.ceil(share / steps),
            f"{total} samples over {ranks} ranks in {steps} micro-steps of {LARGEST_MICRO_BATCH} at most; {why}",
        )
    steps = math.ceil(total / (chosen.value * ranks))
    follows = (
        Choice(steps, f"{total} samples / ({chosen.value} x {ranks} ranks)")
        if accumulation == "auto"
        else Choice(accumulation, "given")
    )
    return {
        "train.global_batch_size": whole,
        "train.micro_batch_size": chosen,
        "train.gradient_accumulation_steps": follows,
    }


def total_choice(job: Job, given: frozenset[str], total: int, ranks: int) -> Choice[int]:
    """Return the global batch with where it comes from."""
    if "train.global_batch_size" in given:
        return Choice(total, "given")
    if total == job.train.global_batch_size:
        return Choice(total, "default")
    parts = (job.train.micro_batch_size, job.train.gradient_accumulation_steps, ranks)
    assert total == effective_batch(*parts)  # type: ignore[arg-type]
    return Choice(total, f"micro-batch x accumulation x ranks = {parts[0]} x {parts[1]} x {parts[2]}")


def _checkpointing(job: Job, kind: str, why: str) -> Choice[bool]:
    asked = job.train.gradient_checkpointing
    if asked != "auto":
        return Choice(asked, "given")
    if kind == "cpu":
        return Choice(False, "host memory is not the limit of a CPU run")
    return Choice(True, f"saves memory at a third more compute; {why}")


def _reduced(job: Job, why: str) -> Choice[bool]:
    asked = job.train.sync_each_micro_batch
    if asked != "auto":
        return Choice(asked, "given")
    return Choice(False, f"gradients are reduced once a step, which is faster; {why}")

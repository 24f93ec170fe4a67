"""What a run goes on with after its memory ran out: a layout that needs less, and why; or what else would help."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from trainwright.hardware.choice import Choice
from trainwright.job.schema import Job
from trainwright.out_of_memory import LESS_MEMORY, Doing, fragmentation_advice
from trainwright.plan.layout import Layout
from trainwright.plan.options import OFFLOADS, SIMPLEST_FIRST, Sharing, lacking, sharings
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append, read

LARGER_GPU = "h100"
"""What a plan on another card is shown for: one that can be had everywhere, by its key in the catalogue."""


@dataclass(frozen=True)
class LayoutChange:
    """The layout that follows one whose memory did not suffice; `choices` are the values that differ, with reasons."""

    layout: Layout
    choices: dict[str, Choice[Any]]

    @property
    def lines(self) -> list[str]:
        """The choices as printed."""
        return [f"  {key} = {choice.value}  ({choice.reason})" for key, choice in self.choices.items()]


def smaller(job: Job, layout: Layout, doing: Doing, cause: str) -> LayoutChange | None:
    """Return what to go on with, None where nothing is left that the job allows.

    The samples of a step and all that is learned from them stay the same: no whole gradients between micro-batches;
    half the micro-batch and twice the accumulation (or half the evaluation's batch), down to one sample; then gradient
    checkpointing; then the most sparing way to share the model.
    """
    if doing == "evaluation" and layout.eval_batch_size > 1:
        half = layout.eval_batch_size // 2
        reason = f"half of {layout.eval_batch_size}: {cause}"
        return _change(layout, {"eval_batch_size": half}, {"eval.batch_size": Choice(half, reason)})
    sparing = _in_training(job, layout, cause) if doing == "training" else None
    return sparing or _shared_more(job, layout, cause)


def _change(layout: Layout, values: Mapping[str, Any], choices: dict[str, Choice[Any]]) -> LayoutChange:
    return LayoutChange(dataclasses.replace(layout, **values), choices)


def _in_training(job: Job, layout: Layout, cause: str) -> LayoutChange | None:
    """Return what makes a step need less, None where all of it is done already or was decided by the job."""
    may_sync = layout.strategy == "fsdp2" and job.train.sync_each_micro_batch == "auto"
    keeps_whole = layout.gradient_accumulation_steps > 1 and not layout.sync_each_micro_batch
    if may_sync and keeps_whole:
        choice = Choice(True, f"gradients are reduced at once instead of kept whole: {cause}")
        return _change(layout, {"sync_each_micro_batch": True}, {"train.sync_each_micro_batch": choice})
    if layout.micro_batch_size > 1:
        return _half_the_micro_batch(layout, cause, may_sync=may_sync)
    if job.train.gradient_checkpointing == "auto" and not layout.gradient_checkpointing:
        choice = Choice(True, f"activations are computed twice instead of kept: {cause}")
        return _change(layout, {"gradient_checkpointing": True}, {"train.gradient_checkpointing": choice})
    return None


def _shared_more(job: Job, layout: Layout, cause: str) -> LayoutChange | None:
    sharing = _most_sparing(job, layout)
    if sharing is None:
        return None
    choices: dict[str, Choice[Any]] = {}
    if sharing.strategy != layout.strategy:
        choices["resources.strategy"] = Choice(sharing.strategy, f"keeps the least on each rank: {cause}")
    if sharing.offload != layout.offload:
        choices["resources.offload"] = Choice(sharing.offload, f"kept in host memory: {cause}")
    values = {"strategy": sharing.strategy, "offload": sharing.offload, "sync_each_micro_batch": False}
    return _change(layout, values, choices)


def _half_the_micro_batch(layout: Layout, cause: str, *, may_sync: bool) -> LayoutChange:
    micro = layout.micro_batch_size // 2
    changed = layout.with_micro_batch(micro)
    accumulation = changed.gradient_accumulation_steps
    choices: dict[str, Choice[Any]] = {
        "train.micro_batch_size": Choice(micro, f"half of {layout.micro_batch_size}: {cause}"),
        "train.gradient_accumulation_steps": Choice(
            accumulation, f"{layout.global_batch_size} samples in parts of {micro} at most, as many as before"
        ),
    }
    if may_sync and not changed.sync_each_micro_batch:
        changed = dataclasses.replace(changed, sync_each_micro_batch=True)
        choices["train.sync_each_micro_batch"] = Choice(True, f"no gradients are kept whole: {cause}")
    return LayoutChange(changed, choices)


def _most_sparing(job: Job, layout: Layout) -> Sharing | None:
    """Return the way to share the model that leaves the least on a rank, None where it is in use already."""
    lacks = lacking()
    found = [way for way in sharings(job, layout.ranks, layout.device) if way.strategy not in lacks]
    found.sort(key=_sparing)
    if not found or _sparing(found[-1]) <= _sparing(Sharing(layout.strategy, layout.offload)):
        return None
    return found[-1]


def _sparing(way: Sharing) -> tuple[int, int]:
    return SIMPLEST_FIRST.index(way.strategy), OFFLOADS.index(way.offload)


def remember(folder: RunFolder, attempt: int, before: Layout, change: LayoutChange) -> None:
    """Write a change down, so that a later start of the run begins with it."""
    append(
        folder.events_jsonl,
        {
            "event": LESS_MEMORY,
            "attempt": attempt,
            "before": dataclasses.asdict(before),
            "after": dataclasses.asdict(change.layout),
            "choices": {key: {"value": c.value, "reason": c.reason} for key, c in change.choices.items()},
        },
    )


def as_remembered(folder: RunFolder, layout: Layout) -> LayoutChange:
    """Return what this run has learned of a layout: the one that followed it, or itself where it has not failed."""
    followed = {}
    for event in read(folder.events_jsonl):
        if event.get("event") == LESS_MEMORY:
            choices = {key: Choice(**choice) for key, choice in event["choices"].items()}
            followed[Layout.from_json(event["before"])] = LayoutChange(Layout.from_json(event["after"]), choices)
    change = LayoutChange(layout, {})
    while (after := followed.pop(change.layout, None)) is not None:
        change = LayoutChange(after.layout, change.choices | after.choices)
    return change


def changed_plan(plan: Mapping[str, Any], change: LayoutChange) -> dict[str, Any]:
    """Return what plan.json holds with a change in it; its estimate was one of another layout."""
    if not change.choices:
        return dict(plan)
    choices = {key: {"value": choice.value, "reason": choice.reason} for key, choice in change.choices.items()}
    return {
        **plan,
        "layout": dataclasses.asdict(change.layout),
        "choices": dict(sorted({**plan["choices"], **choices}.items())),
        "estimate": None,
        "least": None,
        "no_estimate": "the layout that was estimated ran out of memory",
    }


def remedies(job: Job, layout: Layout, said: str, asked: Sequence[str], count: int = 3) -> list[str]:
    """Return `count` commands that need less memory, the least intrusive first.

    `asked` is the job and its overrides as the user named them. What learns something else begins anew.
    """
    train = shlex.join(["trainwright", "train", *asked])
    plan = shlex.join(["trainwright", "plan", *asked])
    changes = islice(_remedies(job, layout, said), count)
    return [change.format(train=train, plan=plan) for change in changes]


def _remedies(job: Job, layout: Layout, said: str) -> Iterator[str]:
    saved_model, optim = job.model.from_scratch is None, job.train.optim
    setting = fragmentation_advice(said)
    if setting is not None:
        yield f"{setting} {{train}}"
    if not layout.gradient_checkpointing:
        yield "{train} train.gradient_checkpointing=true"
    if job.resources.strategy != "auto" and layout.strategy != "zero3" and layout.ranks > 1 and optim == "adamw":
        yield "{train} resources.strategy=auto"
    if layout.precision == "fp32":
        yield "{train} resources.precision=bf16"
    if job.method.type == "full" and saved_model:
        yield "{train} method.type=lora --fresh"
    yield f"{{train}} data.max_length={max(1, job.data.max_length // 2)} --fresh"
    if optim == "adamw" and layout.strategy in ("single", "ddp"):
        yield "{train} train.optim=adafactor --fresh"
    if layout.device == "cuda" and job.method.type != "qlora" and saved_model:
        yield "{train} method.type=qlora --fresh"
    yield f"{{plan}} --gpus {LARGER_GPU}:{layout.ranks}"
    yield "trainwright gpus"

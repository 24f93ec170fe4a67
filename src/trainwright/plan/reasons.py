"""Why a candidate was chosen: each choice against the alternatives that were estimated with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device
from trainwright.hardware.reading import GIB
from trainwright.plan.by_rule import total_choice
from trainwright.plan.layout import Layout
from trainwright.plan.options import OFFLOADS, SIMPLEST_FIRST
from trainwright.plan.search import EVAL_FACTOR, SAME_TIME, Candidate, SearchRequest, weakest_precision

Choices = dict[str, Choice[Any]]


def reasons(question: SearchRequest, chosen: Candidate, ranked: Sequence[Candidate]) -> Choices:
    """Return every choice of a candidate with its reason."""
    job, layout = question.job, chosen.layout
    precision = weakest_precision(job, chosen.devices)
    same_devices = [candidate for candidate in ranked if candidate.devices == chosen.devices]
    return {
        "resources.ranks": _ranks(question, chosen, ranked),
        "resources.strategy": _strategy(question, chosen, same_devices),
        "resources.precision": Choice(precision.value, precision.reason),
        "train.global_batch_size": total_choice(job, question.given, layout.global_batch_size, layout.ranks),
        "train.micro_batch_size": _micro_batch(question, chosen, same_devices),
        "train.gradient_accumulation_steps": _accumulation(question, chosen),
        "train.gradient_checkpointing": _checkpointing(question, chosen, same_devices),
        "eval.batch_size": _evaluation(question, chosen),
        **_reductions(question, chosen, same_devices),
        **_balance(chosen),
        **_allocator(question),
    }


def _allocator(question: SearchRequest) -> Choices:
    if question.expanding_by is None:
        return {}
    reason = "set in this environment: what the allocator holds besides is estimated so"
    return {f"environment {question.expanding_by}": Choice("expandable_segments:True", reason)}


def describe(candidate: Candidate) -> str:
    """Return devices and strategy of a candidate in a few words: `2 x NVIDIA A100, fsdp2`."""
    return f"{device_text(candidate)}, {sharing_text(candidate.layout)}"


def sharing_text(layout: Layout) -> str:
    """Return how ranks share the work: `zero3 with optimizer in host memory`."""
    return layout.strategy if layout.offload == "none" else f"{layout.strategy} with {layout.offload} in host memory"


def at_once(candidate: Candidate) -> str:
    """Return what of a step a candidate computes at once: `micro-batch 4, checkpointed`."""
    layout = candidate.layout
    return f"micro-batch {layout.micro_batch_size}" + (", checkpointed" if layout.gradient_checkpointing else "")


def device_text(candidate: Candidate) -> str:
    """Return the devices of a candidate by model: `2 x NVIDIA A100-SXM4-80GB + 2 x Tesla V100`."""
    return devices_text(candidate.devices)


def devices_text(devices: Sequence[Device]) -> str:
    """Return devices by model, with their number."""
    names = [device.name for device in devices]
    return " + ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _ranks(question: SearchRequest, chosen: Candidate, ranked: Sequence[Candidate]) -> Choice[int]:
    count = len(chosen.devices)
    others = _best_by(ranked, lambda candidate: candidate.devices, chosen)
    if question.job.resources.ranks != "auto" or not others:
        return Choice(count, "one process a GPU")
    rivals = [
        f"{device_text(other)} {against}"
        for other in sorted(others, key=lambda other: abs(len(other.devices) - count))[:2]
        if (against := _against(chosen, other)) is not None
    ]
    return Choice(count, f"one process a GPU on {device_text(chosen)}" + (f"; {'; '.join(rivals)}" if rivals else ""))


def _strategy(question: SearchRequest, chosen: Candidate, same_devices: Sequence[Candidate]) -> Choice[str]:
    layout = chosen.layout
    if question.job.resources.strategy != "auto":
        return Choice(layout.strategy, "given")

    def sharing(candidate: Candidate) -> tuple[int, int]:
        return SIMPLEST_FIRST.index(candidate.layout.strategy), OFFLOADS.index(candidate.layout.offload)

    simpler = [other for other in _best_by(same_devices, sharing, chosen) if sharing(other) < sharing(chosen)]
    rivals = [
        f"{other.layout.strategy} {against}" for other in simpler if (against := _against(chosen, other)) is not None
    ]
    used = _use(chosen)
    if layout.strategy in ("single", "ddp"):
        return Choice(layout.strategy, f"the whole model fits on each GPU: {used}")
    return Choice(layout.strategy, f"{used}; {'; '.join(rivals)}" if rivals else used)


def _micro_batch(question: SearchRequest, chosen: Candidate, same_devices: Sequence[Candidate]) -> Choice[int]:
    layout, train = chosen.layout, question.job.train
    micro = layout.micro_batch_size
    if train.micro_batch_size != "auto":
        return Choice(micro, "given")
    if train.gradient_accumulation_steps != "auto":
        return Choice(micro, f"{layout.global_batch_size} samples over {layout.ranks} ranks, given accumulation")
    alike = [other for other in same_devices if _way(other) == _way(chosen)]
    larger = [other for other in alike if other.layout.micro_batch_size > micro]
    if any(other.why_not is None for other in larger):
        return Choice(micro, f"as fast as larger ones, with less memory: {_use(chosen)}")
    if layout.gradient_accumulation_steps == 1:
        return Choice(micro, f"the whole batch at once fits: {_use(chosen)}")
    return Choice(micro, f"the largest that fits and divides the batch: {_use(chosen)}")


def _accumulation(question: SearchRequest, chosen: Candidate) -> Choice[int]:
    layout = chosen.layout
    steps = layout.gradient_accumulation_steps
    if question.job.train.gradient_accumulation_steps != "auto":
        return Choice(steps, "given")
    if layout.rank_samples:
        return Choice(steps, f"{layout.global_batch_size} samples in parts of {layout.micro_batch_size} at most")
    return Choice(steps, f"{layout.global_batch_size} samples / ({layout.micro_batch_size} x {layout.ranks} ranks)")


def _checkpointing(question: SearchRequest, chosen: Candidate, same_devices: Sequence[Candidate]) -> Choice[bool]:
    layout = chosen.layout
    on = layout.gradient_checkpointing
    if question.job.train.gradient_checkpointing != "auto":
        return Choice(on, "given")
    if not on:
        return Choice(on, "the activations fit, and nothing is computed twice")
    without = [
        other
        for other in same_devices
        if other.layout.strategy == layout.strategy
        and other.layout.offload == layout.offload
        and not other.layout.gradient_checkpointing
    ]
    comparison = [against for other in without[:1] if (against := _against(chosen, other)) is not None]
    return Choice(on, f"without it: {comparison[0]}" if comparison else "as fast as without it, with less memory")


def _reductions(question: SearchRequest, chosen: Candidate, same_devices: Sequence[Candidate]) -> Choices:
    """Return whether each micro-batch reduces its gradients, where that is a choice."""
    layout, job = chosen.layout, question.job
    if layout.strategy != "fsdp2" or layout.gradient_accumulation_steps == 1:
        return {}
    if job.train.sync_each_micro_batch != "auto":
        reason = "given"
    elif job.script is not None:
        reason = "a script reduces once a step, unless it says otherwise"
    elif not layout.sync_each_micro_batch:
        reason = "whole gradients fit until the last micro-batch, and are reduced once a step"
    else:
        reason = "no gradients are kept whole"
        whole = next((other for other in same_devices if _keeps_whole_gradients(other.layout)), None)
        if whole is not None and (against := _against(chosen, whole)) is not None:
            batch = f"{whole.layout.micro_batch_size} x {whole.layout.gradient_accumulation_steps}"
            reason = f"reduced once a step, and whole until then, {batch} {against}"
    return {"train.sync_each_micro_batch": Choice(layout.sync_each_micro_batch, reason)}


def _keeps_whole_gradients(layout: Layout) -> bool:
    several = layout.gradient_accumulation_steps > 1
    return layout.strategy == "fsdp2" and several and not layout.sync_each_micro_batch


def _balance(chosen: Candidate) -> Choices:
    """Return the shares of GPUs that are not alike, and what they are worth."""
    layout, time, equal = chosen.layout, chosen.estimate.time, chosen.estimate.equal_parts
    if not layout.rank_samples:
        return {}
    assert time is not None and equal is not None
    shares = " + ".join(map(str, layout.rank_samples))
    gain = equal.step_s / time.step_s
    return {"resources.balance": Choice(shares, f"samples of a step by speed: {gain:.2f} x as fast as equal parts")}


def _evaluation(question: SearchRequest, chosen: Candidate) -> Choice[int]:
    size, micro = chosen.layout.eval_batch_size, chosen.layout.micro_batch_size
    if question.job.eval.batch_size != "auto":
        return Choice(size, "given")
    if chosen.layout.rank_samples:
        return Choice(size, "keeps no gradients, and fits on each GPU")
    if size == EVAL_FACTOR * micro:
        return Choice(size, f"{EVAL_FACTOR} x micro-batch, as evaluation keeps no gradients")
    return Choice(size, f"{size // micro} x micro-batch; {EVAL_FACTOR} x would not fit")


def _best_by(ranked: Sequence[Candidate], key: Callable[[Candidate], object], chosen: Candidate) -> list[Candidate]:
    """Return the best other candidate for each value of `key`, in order."""
    best: dict[object, Candidate] = {}
    for candidate in ranked:
        best.setdefault(key(candidate), candidate)
    return [candidate for value, candidate in best.items() if value != key(chosen)]


def _way(candidate: Candidate) -> tuple[str, str, bool, bool]:
    layout = candidate.layout
    return layout.strategy, layout.offload, layout.gradient_checkpointing, layout.sync_each_micro_batch


def _against(chosen: Candidate, other: Candidate) -> str | None:
    """Return why `other` is not as good, None where it is."""
    if other.why_not is not None:
        return other.why_not
    mine, theirs = chosen.estimate.time, other.estimate.time
    if mine is None or theirs is None:
        return None
    ratio = theirs.step_s / mine.step_s
    if ratio > 1 + SAME_TIME:
        return f"takes {ratio - 1:.0%} longer"
    if ratio < 1 - SAME_TIME:
        return f"takes {1 - ratio:.0%} less time"
    return None


def _use(candidate: Candidate) -> str:
    estimate = candidate.estimate
    peak = f"{estimate.peak_bytes / GIB:.1f}"
    return f"{peak} GiB" if estimate.capacity is None else f"{peak} of {estimate.capacity.total_bytes / GIB:.1f} GiB"

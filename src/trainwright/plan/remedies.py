"""When nothing fits: the nearest changes that would, each with the memory it is predicted to need."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from trainwright.errors import UserError
from trainwright.hardware import catalog
from trainwright.hardware.inventory import Device, parse_inventory
from trainwright.hardware.reading import GIB
from trainwright.job.schema import Job
from trainwright.plan.capacity import capacity_of
from trainwright.plan.confirmed import confirmed
from trainwright.plan.reasons import at_once, sharing_text
from trainwright.plan.search import Candidate, Goal, SearchRequest, search

SHORTEST_LENGTH = 128
DeviceSets = Sequence[tuple[Device, ...]]


@dataclass(frozen=True)
class Remedy:
    """One change as words and as overrides of the job (none for other hardware), and the best layout under it."""

    change: str
    overrides: tuple[str, ...]
    candidate: Candidate

    def __str__(self) -> str:
        estimate = self.candidate.estimate
        of_capacity = "" if estimate.capacity is None else f" of {estimate.capacity.total_bytes / GIB:.1f}"
        with_what = f"{sharing_text(self.candidate.layout)}, {at_once(self.candidate)}"
        how = f"  ({' '.join(self.overrides)})" if self.overrides else ""
        return f"{self.change}: {estimate.peak_bytes / GIB:.1f}{of_capacity} GiB with {with_what}{how}"


def remedies(question: SearchRequest, device_sets: DeviceSets, goal: Goal, count: int = 3) -> list[Remedy]:
    """Return the first `count` changes under which something fits, the least intrusive first."""
    return list(islice(_all(question, device_sets, goal), count))


def _all(question: SearchRequest, device_sets: DeviceSets, goal: Goal) -> Iterator[Remedy]:
    for change, overrides, job in _changes_of_the_run(question.job):
        found = _fits(dataclasses.replace(question, job=job), device_sets, goal)
        if found is not None:
            yield _spelled(change, overrides, found)
    for change, overrides, job in _changes_of_the_method(_sparing(question.job)):
        found = _fits(dataclasses.replace(question, job=job), device_sets, goal)
        if found is not None:
            yield Remedy(change, overrides, found)
    yield from _shorter(question, device_sets, goal)
    yield from _other_cards(question, device_sets, goal)


def _changes_of_the_run(job: Job) -> Iterator[tuple[str, tuple[str, ...], Job]]:
    """What changes how the run is made and not what it learns."""
    train, resources = job.train, job.resources
    if train.micro_batch_size != "auto":
        free: dict[str, Any] = {"micro_batch_size": "auto", "gradient_accumulation_steps": "auto"}
        yield "a smaller micro-batch", ("train.micro_batch_size=",), _with(job, "train", free)
    if train.gradient_checkpointing is False:
        yield "checkpointing", ("train.gradient_checkpointing=",), _with(job, "train", {"gradient_checkpointing": True})
    if train.sync_each_micro_batch is False:
        changed = _with(job, "train", {"sync_each_micro_batch": "auto"})
        yield "gradients reduced in every micro-batch", ("train.sync_each_micro_batch=",), changed
    if job.eval.batch_size != "auto":
        yield "a smaller evaluation batch", ("eval.batch_size=",), _with(job, "eval", {"batch_size": "auto"})
    if resources.strategy != "auto":
        yield (
            "another strategy",
            ("resources.strategy=", "resources.offload="),
            _with(job, "resources", {"strategy": "auto", "offload": "none"}),
        )
    relaxed = _with(_with(job, "resources", {"strategy": "auto", "offload": "none"}), "train", _ALL_AUTO)
    if relaxed != job and sum((train.micro_batch_size != "auto", resources.strategy != "auto")) > 1:
        keys = ["train.micro_batch_size=", "train.gradient_checkpointing=", "resources.strategy=", "resources.offload="]
        if train.sync_each_micro_batch is False:
            keys.append("train.sync_each_micro_batch=")
        yield "another micro-batch, checkpointing and strategy", tuple(keys), relaxed


_ALL_AUTO: Mapping[str, Any] = {
    "micro_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_checkpointing": "auto",
    "sync_each_micro_batch": "auto",
}


def _changes_of_the_method(job: Job) -> Iterator[tuple[str, tuple[str, ...], Job]]:
    """What changes what is trained; adapters need a saved model below them."""
    if job.model.from_scratch is not None:
        return
    for method, words in (("lora", "LoRA instead of all weights"), ("qlora", "QLoRA (4-bit base)")):
        if job.method.type not in (method, "qlora"):
            changed = _with(job, "method", {"type": method, "freeze": []})
            yield words, (f"method.type={method}",), changed


def _sparing(job: Job) -> Job:
    """Return the job with the least at once that it leaves open, so that methods are compared at one micro-batch."""
    train = job.train
    changes: dict[str, Any] = {}
    if train.micro_batch_size == train.gradient_accumulation_steps == "auto":
        changes["micro_batch_size"] = 1
    if train.gradient_checkpointing == "auto":
        changes["gradient_checkpointing"] = True
    return _with(job, "train", changes)


def _shorter(question: SearchRequest, device_sets: DeviceSets, goal: Goal) -> Iterator[Remedy]:
    length = question.job.data.max_length // 2
    while length >= SHORTEST_LENGTH:
        job = _with(question.job, "data", {"max_length": length})
        found = _fits(dataclasses.replace(question, job=job), device_sets, goal)
        if found is not None:
            yield Remedy(f"sequences of {length} tokens at most", (f"data.max_length={length}",), found)
            return
        length //= 2


def _other_cards(question: SearchRequest, device_sets: DeviceSets, goal: Goal) -> Iterator[Remedy]:
    """As many of a larger model, the smallest that does; then more GPUs of the same model."""
    most = max(device_sets, key=len)
    sizes = [capacity.total_bytes for device in most if (capacity := capacity_of(device)) is not None]
    for key, total_bytes in _larger_cards(min(sizes, default=0)):
        devices = parse_inventory(f"{key}:{len(most)}").usable
        found = _fits(question, [devices], goal)
        if found is not None:
            name = devices[0].name
            yield Remedy(f"a bigger card: {len(most)} x {name} ({total_bytes / GIB:.0f} GiB)", (), found)
            break
    first = most[0]
    if first.catalog_key is None:
        return
    for factor in (2, 4, 8):
        devices = parse_inventory(f"{first.catalog_key}:{len(most) * factor}").usable
        found = _fits(question, [devices], goal)
        if found is not None:
            yield Remedy(f"more cards: {len(devices)} x {first.name}", (), found)
            return


def _larger_cards(than_bytes: int) -> list[tuple[str, int]]:
    """Keys of the CUDA GPUs of the catalogue with more memory, the smallest first."""
    found = [
        (total, key)
        for key, gpu in catalog.catalog().gpus.items()
        if gpu.kind == "cuda" and (total := gpu.total_bytes) is not None and total > than_bytes
    ]
    smallest: dict[int, str] = {}
    for total, key in sorted(found):
        smallest.setdefault(round(total / GIB), key)
    return [(key, size * GIB) for size, key in sorted(smallest.items())]


def _fits(question: SearchRequest, device_sets: DeviceSets, goal: Goal) -> Candidate | None:
    try:
        found = search(question, device_sets, goal)
    except UserError:  # the change contradicts something else in the job
        return None
    best = confirmed(question, found, lambda candidates: candidates[0], goal)[0] if found else None
    return best if best is not None and best.why_not is None else None


def _spelled(change: str, keys: tuple[str, ...], found: Candidate) -> Remedy:
    """Write the values that the search found behind the keys that were set free."""
    layout = found.layout
    values = {
        "train.micro_batch_size=": str(layout.micro_batch_size),
        "train.gradient_checkpointing=": str(layout.gradient_checkpointing).lower(),
        "train.sync_each_micro_batch=": str(layout.sync_each_micro_batch).lower(),
        "eval.batch_size=": str(layout.eval_batch_size),
        "resources.strategy=": layout.strategy,
        "resources.offload=": layout.offload,
    }
    return Remedy(change, tuple(key + values[key] for key in keys), found)


def _with(job: Job, section: str, changes: Mapping[str, Any]) -> Job:
    return job.model_copy(update={section: getattr(job, section).model_copy(update=dict(changes))})

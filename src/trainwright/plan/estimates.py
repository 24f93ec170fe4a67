"""What a layout will cost: the memory of each rank and of the host, the time of a step and of the run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trainwright.anatomy import Anatomy
from trainwright.estimate.calibration import Basis, Calibration
from trainwright.estimate.figures import HostMemory, Memory, StepTime
from trainwright.estimate.measured_runs import Kind
from trainwright.estimate.request import Method, Request
from trainwright.estimate.time import RunTime, run_time, step_time, why_not
from trainwright.hardware import catalog
from trainwright.hardware.inventory import Device, Host
from trainwright.hardware.reading import GIB, NotAvailable
from trainwright.job.padding import needs_padding_mask
from trainwright.job.schedule import steps_per_epoch
from trainwright.job.schema import Job
from trainwright.plan.capacity import MARGIN, Capacity, capacity_of, usual_host_bytes
from trainwright.plan.job_model import AUTO_CLASSES
from trainwright.plan.layout import Layout

_ATTENTION: dict[str, Literal["auto", "eager", "flash_attention_2"]] = {
    "auto": "auto",
    "sdpa": "auto",
    "eager": "eager",
    "flash_attention_2": "flash_attention_2",
}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Figures of one layout: estimates, corrected by what earlier runs measured where there are any.

    `memory_basis` and `time_basis` say what each rests on; `first_memory` and `first_step_s` are what they were before.

    `capacity` is that of the GPU with the least room, None where no memory is known. `host` is None for a layout that
    fails on the GPU already. `time` is None where a device's speed is not known (`no_time` says why), `run` also where
    the number of samples is not. `equal_parts` is the time of a step in equal parts, where the layout has others.
    """

    memory: Memory
    memory_basis: Basis
    first_memory: Memory
    capacity: Capacity | None
    host: HostMemory | None
    time: StepTime | None = None
    time_basis: Basis | None = None
    first_step_s: float | None = None
    no_time: str | None = None
    steps: int | None = None
    run: RunTime | None = None
    equal_parts: StepTime | None = None

    @property
    def peak_bytes(self) -> int:
        """What nvidia-smi will show at most, an evaluation included, which the quick form takes to be as fragmented."""
        memory = self.memory
        outside = memory.device_bytes - memory.reserved_bytes
        evaluation = memory.evaluation_reserved_bytes
        if evaluation is None:
            evaluation = (memory.evaluation_bytes or 0) * memory.reserved_bytes // memory.allocated_bytes
        return max(memory.device_bytes, evaluation + outside)

    @property
    def used_share(self) -> float | None:
        """Peak over capacity."""
        return None if self.capacity is None else self.peak_bytes / self.capacity.total_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain data for plan.json; every figure in it is an estimate."""
        return {
            "memory_kind": self.memory_basis.mark,
            "memory": dataclasses.asdict(self.memory) | {"peak_bytes": self.peak_bytes},
            "capacity": None if self.capacity is None else dataclasses.asdict(self.capacity),
            "host": None if self.host is None else dataclasses.asdict(self.host),
            "time_kind": None if self.time_basis is None else self.time_basis.mark,
            "time": None if self.time is None else dataclasses.asdict(self.time),
            "uncalibrated": {"memory": dataclasses.asdict(self.first_memory), "step_s": self.first_step_s},
            "equal_parts": None if self.equal_parts is None else dataclasses.asdict(self.equal_parts),
            "no_time": self.no_time,
            "steps": self.steps,
            "run": None if self.run is None else dataclasses.asdict(self.run),
        }


@dataclass(frozen=True)
class Amount:
    """How much there is to learn from: samples, and the tokens that a sample has on average (None: max_length)."""

    samples: int | None = None
    tokens_per_sample: int | None = None


def samples_in(job: Job) -> int | None:
    """Return the number of examples in the job's data file, None where counting needs more than reading lines."""
    if job.data.path is None:
        return None
    path = Path(job.data.path)
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as file:
        rows = sum(1 for line in file if line.strip())
    if job.data.limit is not None:
        rows = min(rows, job.data.limit)
    return rows if job.data.eval_path is not None else rows - round(rows * job.data.eval_split)


def request_of(job: Job, config: dict[str, Any], layout: Layout, devices: tuple[Device, ...]) -> Request:
    """Return the training step that a rank of this layout makes."""
    method, kind = job.method, layout.device
    seq2seq = job.task == "seq2seq"
    capability = min((c for d in devices if not isinstance(c := d.compute_capability, NotAvailable)), default=(8, 0))
    return Request(
        config=config,
        auto_class=AUTO_CLASSES[job.task],
        method=_method(
            method.type,
            method.r,
            method.alpha,
            method.dropout,
            method.targets if isinstance(method.targets, str) else tuple(method.targets),
            tuple(method.freeze),
        ),
        precision=layout.precision,  # type: ignore[arg-type]
        optimizer=job.train.optim,
        max_grad_norm=job.train.max_grad_norm,
        micro_batch_size=layout.micro_batch_size,
        sequence_length=job.data.max_length,
        target_length=job.data.max_length if seq2seq else None,
        batch="packed" if job.data.packing else "padded",
        padding_mask=seq2seq or needs_padding_mask(config),
        gradient_accumulation_steps=layout.gradient_accumulation_steps,
        gradient_checkpointing="non_reentrant" if layout.gradient_checkpointing else "none",
        attention=_ATTENTION[job.model.attn_implementation],
        strategy=layout.strategy,  # type: ignore[arg-type]
        offload=layout.offload,  # type: ignore[arg-type]
        world_size=layout.ranks,
        sync_each_micro_batch=layout.sync_each_micro_batch,
        evaluation_batch_size=layout.eval_batch_size if _evaluates(job) else None,
        device="cuda" if kind == "cuda" else "cpu",
        compute_capability=capability,
    )


@cache
def _method(
    type: Literal["full", "lora", "qlora"],
    r: int,
    alpha: float,
    dropout: float,
    targets: str | tuple[str, ...],
    freeze: tuple[str, ...],
) -> Method:
    """Return one and the same method for the same values: what is known of a method is found by its identity."""
    named = targets if isinstance(targets, str) else list(targets)
    return Method(type=type, r=r, alpha=alpha, dropout=dropout, targets=named, freeze=list(freeze))


@dataclass(frozen=True, kw_only=True)
class Cards:
    """What the devices of a layout have in common: the least memory among them, and the most ranks on one node."""

    capacity: Capacity | None
    tightest: catalog.GpuSpec | None
    ranks_on_node: int

    @staticmethod
    def of(devices: tuple[Device, ...]) -> Cards:
        """Look at every device; the capacity is not known where that of one is not."""
        capacities = [capacity_of(device) for device in devices]
        known = [(found.total_bytes, rank) for rank, found in enumerate(capacities) if found is not None]
        tightest = min(known)[1] if known else 0
        key = devices[tightest].catalog_key
        return Cards(
            capacity=capacities[tightest] if len(known) == len(devices) else None,
            tightest=None if key is None else catalog.catalog().gpus[key],
            ranks_on_node=max(Counter(device.node for device in devices).values()),
        )


def with_time(
    estimate: Estimate,
    job: Job,
    anatomy: Anatomy,
    request: Request,
    devices: tuple[Device, ...],
    amount: Amount,
    calibration: Calibration,
    kind: Kind,
) -> Estimate:
    """Return the estimate with the time of a step and, where the number of samples is known, of the run."""
    reason = why_not(request, devices)
    if reason is not None:
        return dataclasses.replace(estimate, no_time=reason)
    timed = as_timed(request, amount)
    return with_step_time(
        estimate, step_time(anatomy, timed, devices), job, anatomy, timed, devices, amount, calibration, kind
    )


def as_timed(request: Request, amount: Amount) -> Request:
    """Return the step whose time counts: with samples of the usual length, not of the longest."""
    if amount.tokens_per_sample is None:
        return request
    return dataclasses.replace(request, sequence_length=amount.tokens_per_sample)


def with_step_time(
    estimate: Estimate,
    first: StepTime,
    job: Job,
    anatomy: Anatomy,
    timed: Request,
    devices: tuple[Device, ...],
    amount: Amount,
    calibration: Calibration,
    kind: Kind,
) -> Estimate:
    """Return the estimate with a time of a step as it was first estimated, and what follows for the run."""
    time, basis = calibration.time(first, kind)
    estimate = dataclasses.replace(estimate, time=time, time_basis=basis, first_step_s=first.step_s)
    steps = total_steps(job, amount.samples)
    if steps is None:
        return estimate
    evaluations, held_out = _evaluations(job, steps, amount)
    run = run_time(anatomy, timed, devices, time, steps=steps, evaluations=evaluations, evaluation_samples=held_out)
    return dataclasses.replace(estimate, steps=steps, run=run)


def _evaluations(job: Job, steps: int, amount: Amount) -> tuple[int, int]:
    """Return how often a run evaluates, and on how many samples; 0 where a file of its own was not counted."""
    if amount.samples is None or not job.data.eval_split:
        return 0, 0
    held_out = round(amount.samples * job.data.eval_split / (1 - job.data.eval_split))
    if job.eval.limit is not None:
        held_out = min(held_out, job.eval.limit)
    every = job.eval.every
    per_epoch = steps_per_epoch(amount.samples, job.train.global_batch_size, job.train.drop_last)
    interval = every.value if every.unit == "step" else every.value * per_epoch
    return int(steps // interval) if interval >= 1 else 0, held_out


def total_steps(job: Job, samples: int | None) -> int | None:
    """Return the optimizer steps of the whole run."""
    if job.train.max_steps is not None:
        return job.train.max_steps
    if samples is None:
        return None
    per_epoch = steps_per_epoch(samples, job.train.global_batch_size, job.train.drop_last)
    return max(1, round(per_epoch * job.train.num_train_epochs))


def why_too_big(memory_bytes: int, capacity: Capacity | None) -> str | None:
    """Return why a peak does not fit on a GPU, with the figures, or None."""
    if capacity is None or memory_bytes <= capacity.total_bytes * (1 - MARGIN):
        return None
    needs, capacity_gib = memory_bytes / GIB, capacity.total_bytes / GIB
    if memory_bytes <= capacity.total_bytes:
        return f"needs {needs:.1f} of {capacity_gib:.1f} GiB: less than {MARGIN:.0%} would be free"
    return f"needs {needs:.1f} GiB; {capacity_gib:.1f} GiB available"


def why_too_big_for_host(job: Job, host_memory: HostMemory, host: Host) -> str | None:
    """Return why a node's memory does not suffice, with the figures, or None where it does or is not known."""
    total = host.memory_total_bytes if isinstance(host.memory_available_bytes, NotAvailable) else None
    available = total if total is not None else host.memory_available_bytes
    if isinstance(available, NotAvailable):
        return None
    free_gib = job.resources.host_memory_free_gib
    if host_memory.node_bytes <= available - free_gib * GIB:
        return None
    return (
        f"needs {host_memory.node_bytes / GIB:.1f} GiB of host memory; {available / GIB:.1f} GiB available, "
        f"of which {free_gib:g} stay free"
    )


def why_host_may_lack(host_memory: HostMemory | None, host: Host, devices: Sequence[Device]) -> str | None:
    """Return a warning where a node's memory is not known and a layout needs more than such a node usually has."""
    known = (host.memory_available_bytes, host.memory_total_bytes)
    usual = usual_host_bytes(devices)
    if host_memory is None or usual is None or not all(isinstance(size, NotAvailable) for size in known):
        return None
    if host_memory.node_bytes <= usual:
        return None
    return (
        f"needs {host_memory.node_bytes / GIB:,.0f} GiB of host memory on each node; how much there is, is unknown, "
        f"and {usual / GIB:,.0f} GiB is usual (assumed: twice the GPUs' memory). Say it: --gpus '...,host=512gib'"
    )


def _evaluates(job: Job) -> bool:
    return job.data.eval_path is not None or job.data.eval_split > 0

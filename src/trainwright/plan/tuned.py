"""What `trainwright tune` measured, kept on the user's machine, and the micro-batch that a plan takes from it.

One line an answer in `tuned.jsonl`. It holds figures, the model of GPU and library versions; of the model and the data
only digests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trainwright.estimate.measured_runs import Kind, gpu_model, kind_of
from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Device
from trainwright.job.schema import Job
from trainwright.plan.layout import Layout
from trainwright.plan.search import EVAL_FACTOR
from trainwright.runs import records
from trainwright.runs.user_data import user_data_dir

Level = Literal["conservative", "recommended", "aggressive", "extreme"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""How near to the edge a micro-batch is (S2-36)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What decides memory and pace of a micro-batch.

    `learned` is a digest of model, method, task, optimizer and script. `data` is one of where the samples come from,
    None where the longest of them is as long as any can be: then other data needs no more.
    """

    kind: Kind
    learned: str
    max_length: int
    offload: str
    gradient_checkpointing: bool
    ranks: int
    data: str | None
    sync_each_micro_batch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredMicroBatch:
    """One micro-batch as it was measured: the most memory of a rank, and the seconds of a whole optimizer step.

    None where it is not known: a script says nothing of its memory on a CPU, and need not say anything of its pace.
    """

    micro_batch_size: int
    needed_bytes: int | None = None
    capacity_bytes: int | None = None
    step_s: float | None = None

    @property
    def used_share(self) -> float | None:
        """Memory needed over what there is."""
        if self.needed_bytes is None or not self.capacity_bytes:
            return None
        return self.needed_bytes / self.capacity_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What was found for a setting on a `date` (ISO): every micro-batch that ran, the smallest first.

    `levels` are named micro-batches among them, `level` the one that was asked for; `too_large` is the smallest that
    did not run, and `why`. `evaluated` is the largest batch that an evaluation went through, None where there is none.
    """

    date: str
    setting: Setting
    global_batch_size: int
    points: tuple[MeasuredMicroBatch, ...]
    levels: Mapping[str, int]
    level: str
    too_large: int | None
    why: str | None
    evaluated: int | None
    probes: int
    steps: int

    @property
    def micro_batch_size(self) -> int:
        """The micro-batch of the level that was asked for."""
        return self.levels[self.level]

    @property
    def fastest(self) -> MeasuredMicroBatch | None:
        """The micro-batch with the shortest step, None where no time is known."""
        timed = [point for point in self.points if point.step_s is not None]
        return min(timed, key=lambda point: point.step_s or math.inf, default=None)

    def evaluation_batch(self, micro_batch_size: int) -> int:
        """Return the evaluation batch beside a micro-batch: up to three times as much, as far as it was gone through.

        One of the micro-batch's own size needs no more than its training does.
        """
        if self.evaluated is None:
            return EVAL_FACTOR * micro_batch_size
        return micro_batch_size * min(EVAL_FACTOR, max(1, self.evaluated // micro_batch_size))

    def layout(self, planned: Layout, job: Job) -> Layout:
        """Return a planned layout with the micro-batch and, where the job leaves it open, the evaluation batch."""
        size = fitting(self.micro_batch_size, -(-planned.global_batch_size // planned.ranks))
        even = dataclasses.replace(planned, rank_samples=(), rank_micro_batch_sizes=())
        evaluation = self.evaluation_batch(size) if job.eval.batch_size == "auto" else job.eval.batch_size
        return dataclasses.replace(even.with_micro_batch(size), eval_batch_size=evaluation)

    def choices(self, layout: Layout, job: Job) -> dict[str, Choice[Any]]:
        """Return what it decides, with the reason."""
        reason = f"measured by tune on {self.date[:10]}, {self.level}"
        accumulation = layout.gradient_accumulation_steps
        choices: dict[str, Choice[Any]] = {
            "train.micro_batch_size": Choice(layout.micro_batch_size, reason),
            "train.gradient_accumulation_steps": Choice(
                accumulation, f"{layout.global_batch_size} samples in parts of {layout.micro_batch_size} at most"
            ),
        }
        if job.eval.batch_size == "auto":
            choices["eval.batch_size"] = Choice(layout.eval_batch_size, reason)
        return choices


def fitting(micro_batch_size: int, share: int) -> int:
    """Return the largest micro-batch that a rank's share of a step really has where it may have so many samples.

    16 samples in parts of at most 7 are three parts, and so none has more than 6.
    """
    return -(-share // -(-share // min(micro_batch_size, share)))


def setting_of(job: Job, layout: Layout, devices: Sequence[Device]) -> Setting:
    """Return the setting of a job under a layout, for data that is its own."""
    method = job.method.model_dump(mode="json", exclude={"merge"})
    learned = {
        "model": job.model.model_dump(mode="json"),
        "method": method,
        "task": job.task,
        "task_options": job.task_options,
        "script": job.script,
        "optim": job.train.optim,
        "packing": job.data.packing,
    }
    data = job.data.model_dump(mode="json", exclude={"cache_dir", "max_length", "packing"})
    return Setting(
        kind=kind_of(
            (gpu_model(device) for device in devices),
            strategy=layout.strategy,
            method=job.method.type,
            precision=layout.precision,
        ),
        learned=_digest(learned),
        max_length=job.data.max_length,
        offload=layout.offload,
        gradient_checkpointing=layout.gradient_checkpointing,
        ranks=layout.ranks,
        data=_digest(data),
        sync_each_micro_batch=layout.sync_each_micro_batch,
    )


def answer_for(setting: Setting, stored: Sequence[Tuned]) -> Tuned | None:
    """Return the newest answer for a setting."""
    same = [tuned for tuned in stored if _covers(tuned.setting, setting)]
    return same[-1] if same else None


def keep(tuned: Tuned, data_dir: Path | None = None) -> Path:
    """Write an answer down for later commands, and return the file.

    Raises:
        OSError: it cannot be written.
    """
    path = _file(data_dir)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    records.append(path, dataclasses.asdict(tuned))
    return path


def stored_answers(data_dir: Path | None = None) -> tuple[Tuned, ...]:
    """Return every answer on record, the oldest first, without lines that are torn or make no sense."""
    try:
        return tuple(_understood(records.read(_file(data_dir))))
    except (OSError, RuntimeError):
        return ()


def _covers(there: Setting, here: Setting) -> bool:
    """Whether what was measured there holds here; where nothing is installed, as on a login node, any version."""
    versions = there.kind.versions if not here.kind.versions else here.kind.versions
    kind = dataclasses.replace(here.kind, versions=versions)
    return there == dataclasses.replace(here, kind=kind, data=here.data if there.data is not None else None)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _file(data_dir: Path | None) -> Path:
    return (data_dir or user_data_dir()) / "tuned.jsonl"


def _understood(lines: Iterator[dict[str, Any]]) -> Iterator[Tuned]:
    for line in lines:
        try:
            setting = line["setting"]
            found = Tuned(
                **line
                | {
                    "setting": Setting(**setting | {"kind": Kind(**setting["kind"])}),
                    "points": tuple(MeasuredMicroBatch(**point) for point in line["points"]),
                }
            )
            sizes = [point.micro_batch_size for point in found.points]
            makes_sense = all(type(size) is int and size > 0 for size in sizes) and found.micro_batch_size in sizes
            numbers = (found.evaluated, found.too_large)
            makes_sense &= all(number is None or type(number) is int for number in numbers)
            makes_sense &= isinstance(found.date, str) and isinstance(found.level, str)
        except (KeyError, TypeError):
            continue
        if makes_sense:
            yield found

"""Probes of a user's own script: the script itself, told one micro-batch, for so many steps or for so long."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.inventory import Device
from trainwright.hardware.local import local_inventory
from trainwright.hardware.reading import NotAvailable
from trainwright.job.placeholders import names_in
from trainwright.job.schema import Job
from trainwright.launch.failures import cause_of
from trainwright.launch.own_script.script_run import start_script_here, write_script_files
from trainwright.launch.processes import Processes
from trainwright.launch.resume import Start
from trainwright.launch.run_output import tell
from trainwright.launch.supervision import open_attempt
from trainwright.plan.choose import Plan
from trainwright.plan.search import EVAL_FACTOR
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import read
from trainwright.tune.probes import HOST_MEMORY, ProbeWatch
from trainwright.tune.search import ProbeOutcome, Rung

ENOUGH_STEPS = 20
"""A script that has done so many steps has met its memory (S2-37)."""
LOOK_AT_GPUS_EVERY_S = 1.0


def require_micro_batch_field(job: Job) -> None:
    """Refuse a script that is not told the micro-batch.

    Raises:
        UserError: with what to add.
    """
    assert job.script is not None
    if "micro_batch_size" not in names_in(job.script):
        raise UserError(
            "the script is not told the micro-batch, so no other can be tried",
            hints=['script: [..., --batch-size, "{micro_batch_size}"], by the option that your script has for it'],
        )


class ScriptProbes:
    """Probes of a job with a script of its own, one micro-batch each, every one in a folder of its own in `place`."""

    longest: int | None = None

    def __init__(self, place: Path, job: Job, plan: Plan, watch: ProbeWatch) -> None:
        require_micro_batch_field(job)
        self._place, self._job, self._plan, self._watch = place, job, plan, watch
        self._number = 0
        self._shows_steps = False

    def run(self, sizes: Sequence[int], evaluations: Sequence[int]) -> ProbeOutcome:
        """Run the script with one micro-batch; its evaluation is part of it, if it makes one in that time."""
        (size,) = sizes
        self._number += 1
        job = self._job.model_copy(update={"output_dir": str(self._place / f"probe-{self._number}")})
        folder = RunFolder(Path(job.output_dir) / job.name)
        folder.create()
        layout = self._plan.layout.with_micro_batch(size)
        if job.eval.batch_size == "auto":
            layout = dataclasses.replace(layout, eval_batch_size=EVAL_FACTOR * size)
        plan = dataclasses.replace(self._plan, layout=layout)
        write_script_files(folder, job, plan)
        attempt = open_attempt(folder, {}, Start(None, 0, ()))
        gpus = GpuMemory(self._plan.devices)
        processes = start_script_here(job, plan)(folder, layout, attempt)
        ended_by = self._watch.follow(_Enough(processes, folder, gpus))
        steps_s = _steps_s(folder)
        self._shows_steps |= bool(steps_s)
        rung = Rung(
            micro_batch_size=size,
            needed_bytes=gpus.needed_bytes,
            capacity_bytes=gpus.capacity_bytes,
            pass_s=median(known) / layout.gradient_accumulation_steps if (known := [s for s in steps_s if s]) else None,
        )
        ran = ProbeOutcome(rungs=(rung,), steps=len(steps_s))
        if ended_by is not None:
            if ended_by.startswith(HOST_MEMORY):
                return ProbeOutcome(too_large=size, why=ended_by, steps=len(steps_s))
            if steps_s or not self._shows_steps:
                tell(f"  {ended_by}, and its memory sufficed until then")
                return ran
            return ProbeOutcome(lost_at=size, why=f"it showed no step, and {ended_by}")
        if len(steps_s) >= ENOUGH_STEPS or processes.exit_codes() == [0]:
            return ran
        cause = cause_of(processes.failures(folder.attempt_dir(attempt)))
        if cause.out_of_memory_in is not None:
            return ProbeOutcome(too_large=size, why=cause.text, steps=len(steps_s))
        if cause.killed:
            return ProbeOutcome(lost_at=size, why=cause.describe())
        raise UserError(f"a probe failed: {cause.describe()}", exit_code=ExitCode.FAILED)


def _steps_s(folder: RunFolder) -> list[float | None]:
    """Return the seconds of every step that the script has shown, None where it did not say."""
    return [row.get("step_s") for row in read(folder.metrics_jsonl) if row.get("kind") == "train"]


class GpuMemory:
    """The fullest of some GPUs, as NVML shows them from time to time; nothing is known off CUDA."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._names = {device.uuid for device in devices if device.kind == "cuda"}
        self._next_s = 0.0
        self.needed_bytes: int | None = None
        self.capacity_bytes: int | None = None

    def sample(self) -> None:
        """Look at the GPUs, if it is time."""
        if not self._names or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LOOK_AT_GPUS_EVERY_S
        for device in local_inventory("cuda").devices:
            total, free = device.memory_total_bytes, device.memory_free_bytes
            if (
                device.uuid in self._names
                and not isinstance(total, NotAvailable)
                and not isinstance(free, NotAvailable)
            ):
                self.needed_bytes, self.capacity_bytes = max(self.needed_bytes or 0, total - free), total


class _Enough(Processes):
    """The processes of a script, which are no longer needed once it has shown enough steps."""

    def __init__(self, processes: Processes, folder: RunFolder, gpus: GpuMemory) -> None:
        super().__init__(processes.children, processes.killed)
        self._folder, self._gpus = folder, gpus

    @property
    def running(self) -> bool:
        """Whether the script is still to be waited for."""
        self._gpus.sample()
        return super().running and len(_steps_s(self._folder)) < ENOUGH_STEPS

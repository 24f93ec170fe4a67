"""Which checks are made, in which order: of the machine, of a job, and the short form before every run."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.before import job as of_job
from trainwright.doctor.before import machine
from trainwright.doctor.before.check_result import Checked, problem
from trainwright.doctor.before.torch_facts import ask_torch
from trainwright.errors import UserError
from trainwright.hardware.local import local_inventory
from trainwright.job.loading import LoadedJob
from trainwright.plan.requirements import require_runnable


def check_machine() -> Iterator[Checked]:
    """Yield all checks of this machine; torch is asked in a process of its own, which takes some seconds."""
    inventory = local_inventory()
    torch = ask_torch()
    yield from machine.driver(inventory)
    yield from machine.gpus(inventory)
    yield from machine.torch_build(inventory, torch)
    yield from machine.environment(torch)
    yield from machine.packages()
    yield from machine.versions()
    yield from machine.host_memory(inventory)
    yield from machine.shared_memory()
    yield from machine.limits()
    yield from machine.port()


def check_job(loaded: LoadedJob, gpus: str | None = None) -> Iterator[Checked]:
    """Yield all checks of a job here, the full reading of its data last."""
    job = loaded.job
    try:
        require_runnable(job)
    except UserError as error:
        yield problem("job", "; ".join([error.message, *error.problems]), *error.hints)
        return
    yield from of_job.planned(loaded, gpus)
    yield from of_job.output(job)
    yield from of_job.trackers(job)
    yield from of_job.model_files(job)
    yield from of_job.data(job)


def short_check(loaded: LoadedJob) -> Iterator[Checked]:
    """Yield what the cheap checks before every run do not like; nothing that takes a process or reads the data."""
    checks = [
        *machine.versions(),
        *machine.shared_memory(),
        *machine.limits(),
        *of_job.trackers(loaded.job),
        *of_job.output(loaded.job),
    ]
    yield from (checked for checked in checks if checked.status != "ok")

"""`trainwright presets`: the job files that come with the tool."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trainwright.job.preset import Arithmetic
    from trainwright.job.schema import Job


def presets(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Print this preset's job file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the presets, or print one: the job file on stdout, what it comes to on stderr."""
    from trainwright.job.preset import GUIDES

    if name is None:
        _print_list(list(GUIDES), as_json)
    else:
        _print_one(name, as_json)


def _print_list(names: list[str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"schema_version": 1, "presets": [_record(name) for name in names]}, indent=2))
        return
    width = max(map(len, names))
    for name in names:
        job, _ = _job_and_arithmetic(name)
        typer.echo(f"{name:{width}}  {job.description}")
    typer.echo(
        "\n`trainwright presets NAME` prints one; `trainwright train preset:NAME data.path=FILE` runs it.", err=True
    )


def _print_one(name: str, as_json: bool) -> None:
    from trainwright.job.preset import preset_text

    text = preset_text(name)
    if as_json:
        typer.echo(json.dumps({"schema_version": 1, **_record(name), "yaml": text}, indent=2))
        return
    typer.echo(text, nl=False)
    for line in _summary(*_job_and_arithmetic(name)):
        typer.echo(line, err=True)


def _job_and_arithmetic(name: str) -> tuple[Job, Arithmetic]:
    from trainwright.job.loading import load_job
    from trainwright.job.preset import PREFIX, arithmetic

    job = load_job(f"{PREFIX}{name}").job
    return job, arithmetic(name, job)


def _runs_now(job: Job) -> bool:
    from trainwright.job.schema import BUILT_IN_TASKS

    return job.task in BUILT_IN_TASKS


def _record(name: str) -> dict[str, Any]:
    job, sums = _job_and_arithmetic(name)
    return {
        "name": name,
        "description": job.description,
        "task": job.task,
        "runs_in_this_version": _runs_now(job),
        "guide": {
            "gpus": sums.gpus,
            "samples": sums.samples,
            "micro_batch_size": sums.micro_batch_size,
            "gradient_accumulation_steps": sums.gradient_accumulation_steps,
            "effective_batch": sums.effective_batch,
            "steps_per_epoch": sums.steps_per_epoch,
        },
        "claims": job.claims,
    }


def _summary(job: Job, sums: Arithmetic) -> list[str]:
    gpus = "1 GPU" if sums.gpus == 1 else f"{sums.gpus} GPUs"
    product = f"{sums.micro_batch_size} x {sums.gradient_accumulation_steps} x {sums.gpus}"
    lines = [
        f"effective batch: {sums.effective_batch} = {product} (micro-batch x accumulation x GPUs), guide's {gpus}",
    ]
    if sums.samples is not None:
        rest = "a last, smaller batch is left out" if job.train.drop_last else "the last, smaller batch is a step too"
        lines.append(f"steps per epoch: {sums.steps_per_epoch:,} on the guide's {sums.samples:,} samples; {rest}")
    if not _runs_now(job):
        lines.append(f"the task `{job.task}` comes in a later version; this one cannot run it yet")
    lines += [f"claimed by the guide, not measured here: {what}: {claim}" for what, claim in job.claims.items()]
    return lines

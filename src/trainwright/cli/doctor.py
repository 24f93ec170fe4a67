"""`trainwright doctor`: checks before a run, and the one cause of what went wrong after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.doctor.before.check_result import Checked

_JOB_SUFFIXES = (".yaml", ".yml")


def doctor(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB [KEY.PATH=VALUE...] | RUN | LOG...]",
            help="A job to check before its run; or a run folder, log files or a folder of logs to explain.",
        ),
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="LIST", help="With a JOB: which GPUs it is to have.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check this machine and a job, or name the one cause of a failed, slow or hanging run, with its fix."""
    given = what or []
    if given and not _is_job(given[0]):
        from trainwright.doctor.after import diagnose
        from trainwright.doctor.finding import HEALTHY, diagnosis_lines

        diagnosis = diagnose([Path(path) for path in given])
        if as_json:
            typer.echo(json.dumps(diagnosis.to_json(), indent=2))
        else:
            typer.echo("\n".join(diagnosis_lines(diagnosis)))
        raise typer.Exit(diagnosis.finding.cause != HEALTHY)
    from trainwright.doctor.before.check_result import as_data, lines_of

    checks: list[Checked] = []
    for checked in _checks(given, gpus):
        checks.append(checked)
        if not as_json:
            typer.echo("\n".join(lines_of([checked])))
    if as_json:
        typer.echo(json.dumps(as_data(checks), indent=2))
    raise typer.Exit(any(checked.status == "problem" for checked in checks))


def _is_job(name: str) -> bool:
    return name.startswith("preset:") or Path(name).suffix in _JOB_SUFFIXES or Path(name).name == "resolved.json"


def _checks(given: list[str], gpus: str | None) -> Iterator[Checked]:
    from trainwright.doctor.before.check_order import check_job, check_machine

    if given:
        from trainwright.job.loading import load_job

        loaded = load_job(given[0], given[1:])
        yield from check_machine()
        yield from check_job(loaded, gpus)
    else:
        yield from check_machine()

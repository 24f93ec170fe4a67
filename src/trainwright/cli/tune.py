"""`trainwright tune`: the largest and the fastest micro-batch, measured."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def tune(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job file, or preset:NAME.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Values laid over the job.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="LIST", help="Which GPUs: 0,1 (indices, UUIDs, MIG ids).")] = None,
    level: Annotated[
        str, typer.Option(metavar="LEVEL", help="conservative, recommended, aggressive or extreme.")
    ] = "recommended",
    write: Annotated[bool, typer.Option("--write", help="Put the micro-batch into the job file.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="The most that one probe may take.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find the largest and the fastest micro-batch of the job on these devices, in a few short probes.

    Nothing is written to the run folder. Later `plan`, `train` and `tune` of the job use what was measured.
    """
    from trainwright.job.loading import load_job
    from trainwright.tune.tuning import TuneOptions
    from trainwright.tune.tuning import tune as run
    from trainwright.tune.tuning_text import answer_as_data, answer_lines

    options = TuneOptions(
        gpus=gpus, level=level, write=write, fresh=fresh, timeout_s=timeout, asked=(job, *(overrides or ()))
    )
    answer = run(load_job(job, overrides or ()), options)
    if as_json:
        typer.echo(json.dumps(answer_as_data(answer), indent=2))
        return
    for line in answer_lines(answer):
        typer.echo(line)

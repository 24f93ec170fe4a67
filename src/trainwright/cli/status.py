"""`trainwright status`: where a submitted run stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its folder.")],
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder that holds the run folders.")] = Path(
        "outputs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say where a submitted run stands: its job in the queue, its steps, and what to do if it ended."""
    from trainwright.launch.slurm.submitted_run import run_folder, status_of

    status_now = status_of(run_folder(run, output_dir))
    if as_json:
        typer.echo(json.dumps(status_now.to_json(), indent=2))
        return
    for line in status_now.lines():
        typer.echo(line)

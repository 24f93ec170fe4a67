"""`trainwright logs`: what a submitted run's jobs print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its folder.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until no job of the run is left.")] = False,
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder that holds the run folders.")] = Path(
        "outputs"
    ),
) -> None:
    """Print the log of a submitted run, of all its jobs in order."""
    from trainwright.launch.slurm import submitted_run

    folder = submitted_run.run_folder(run, output_dir)
    for line in submitted_run.follow(folder) if follow else submitted_run.said(folder):
        typer.echo(line)

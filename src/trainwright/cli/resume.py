"""`trainwright resume`: a submitted run that ended, back into the queue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its folder.")],
    chain: Annotated[
        int, typer.Option(metavar="N", min=1, help="Submit N jobs, each after the one before, for short limits.")
    ] = 1,
    if_refused: Annotated[
        Literal["keep", "cancel"],
        typer.Option(help="What becomes of a chain's earlier jobs where Slurm refuses a later one."),
    ] = "keep",
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder that holds the run folders.")] = Path(
        "outputs"
    ),
) -> None:
    """Submit a run's script once more and print the job id; it goes on from the newest whole checkpoint."""
    from trainwright.launch.slurm import submitted_run

    for job_id in submitted_run.resume(submitted_run.run_folder(run, output_dir), chain, if_refused):
        typer.echo(job_id)

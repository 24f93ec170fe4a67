"""`trainwright cancel`: end a submitted run, which can go on later."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def cancel(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its folder.")],
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder that holds the run folders.")] = Path(
        "outputs"
    ),
) -> None:
    """Cancel the run's jobs and print their ids; the ranks save as they end, and `trainwright resume` goes on."""
    from trainwright.launch.run_output import tell
    from trainwright.launch.slurm import submitted_run

    cancelled = submitted_run.cancel(submitted_run.run_folder(run, output_dir))
    if not cancelled:
        tell("no job of this run is in the queue or runs")
    for job_id in cancelled:
        typer.echo(job_id)

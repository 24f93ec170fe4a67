"""`trainwright demo`: a small model from nothing that answers questions, stopped and resumed on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    output_dir: Annotated[
        Path, typer.Option("--output-dir", help="Folder for the data, the job files and the runs.")
    ] = Path("trainwright-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Fixes the data, the weights and the order.")] = 42,
) -> None:
    """Make a data set, train on it, stop, resume and ask the model: offline, on two CPU processes, in minutes.

    Run again, it starts anew; the former run is kept beside as `demo.old-1`.
    """
    from trainwright.demo.tour import run_demo

    raise typer.Exit(run_demo(output_dir, seed))

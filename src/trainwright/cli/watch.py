"""`trainwright watch`: a run, or this machine, as it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="Name of the run, or its folder; without it, this machine."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print how things stand, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print how things stand as one JSON document.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve it as a live page on this machine's loopback.")] = False,
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port of the page; 0 lets the system choose.")
    ] = 0,
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder that holds the run folders.")] = Path(
        "outputs"
    ),
) -> None:
    """Show run, ranks, GPUs, host, curves and alerts; plain lines where the output is no terminal."""
    from trainwright.watch.watch_run import Form, show

    form: Form = "json" if as_json else "once" if once else "web" if web else "live"
    show(run, output_dir, form, port=port)

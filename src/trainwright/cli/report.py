"""`trainwright report`: what runs were asked, decided and measured, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names of runs, or their folders.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the page goes [RUN/report.html, of several runs beside the first]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document; a page only with --out.")] = False,
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder that holds the run folders.")] = Path(
        "outputs"
    ),
) -> None:
    """Write what runs were asked, decided and measured as one HTML file, several runs side by side."""
    from trainwright.reports.report_files import report as write

    write(runs, output_dir, out, as_json=as_json)

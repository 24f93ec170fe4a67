"""`trainwright runs`: this user's runs, and where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def runs(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH...]", help="With --rebuild: folders to look for runs in [outputs]."),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE", help="Only preparing, running, finished, stopped, failed, silent or missing; repeatable."
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Only those begun since: a date, or 90min, 36h, 7d, 2w ago.")
    ] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make the index again from the folders.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the runs of this user, the newest first, each as its folder tells it now."""
    from trainwright.errors import UserError
    from trainwright.reports import listing

    if paths and not rebuild:
        raise UserError("PATH goes with --rebuild", hints=[f"trainwright runs --rebuild {paths[0]}"])
    if rebuild:
        listing.rebuild(paths or [Path("outputs")])
    listing.list_runs(state or [], since, as_json=as_json)

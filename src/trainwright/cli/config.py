"""`trainwright config`: what a job comes to, and what a job file may hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trainwright.job.loading import LoadedJob
    from trainwright.job.origins import Origin

# The job room is imported inside the commands: pydantic and ruamel.yaml would double the time of `trainwright --help`.

app = typer.Typer(
    help="Show what a job comes to, or what a job file may hold.", no_args_is_help=True, rich_markup_mode=None
)

_REASONS = {
    "default": "default",
    "file": "given in the job file",
    "override": "given on the command line",
    "preset": "given by the preset",
}


@app.command()
def show(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job file, or preset:NAME.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Values laid over the job.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print every key of a job with its value, where the value comes from, and why."""
    from trainwright.job.loading import load_job

    loaded = load_job(job, overrides or [])
    rows = _rows(loaded)
    if as_json:
        typer.echo(json.dumps({"schema_version": 1, "keys": rows}, indent=2))
        return
    table = [("KEY", "VALUE", "SOURCE", "REASON")]
    table += [(row["key"], _shown(row["value"]), row["location"] or row["source"], row["reason"]) for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for key, value, source, reason in table:
        typer.echo(f"{key:{widths[0]}}  {value:{widths[1]}}  {source:{widths[2]}}  {reason}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a job file, for editors and other programs."""
    from trainwright.job.shape import JOB

    typer.echo(json.dumps(JOB.shape, indent=2))


def _rows(loaded: LoadedJob) -> list[dict[str, Any]]:
    from trainwright.job.loading import leaves
    from trainwright.job.origins import dotted

    rows = []
    for path, value in leaves(loaded.job.model_dump(mode="json")):
        key = dotted(path)
        origin = loaded.origins[key]
        reason = _reason(key, value, origin)
        rows.append(
            {"key": key, "value": value, "source": origin.kind, "location": origin.location or None, "reason": reason}
        )
    return rows


def _reason(key: str, value: object, origin: Origin) -> str:
    if value != "auto":
        return _REASONS[origin.kind]
    chooser = (
        "transformers when the model is loaded"
        if key == "model.attn_implementation"
        else "the plan when the job is run"
    )
    return f"chosen by {chooser}"


def _shown(value: object) -> str:
    """Return a value as it would be written in a job file, on one line: text in quotes only where it needs them."""
    from trainwright.job.scalars import is_plain_text

    if isinstance(value, str) and "\n" not in value and is_plain_text(value):
        return value
    return json.dumps(value, ensure_ascii=False)

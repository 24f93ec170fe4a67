"""`trainwright scaling`: how the job's throughput grows with the GPUs, measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer


def scaling(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job file, or preset:NAME.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Values laid over the job.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="COUNTS", help="How many: 1,2,4,8; on a processor, ranks. Up to all there are by default."
        ),
    ] = None,
    mode: Annotated[
        Literal["both", "weak", "strong"],
        typer.Option(help="weak: the batch of each GPU stays; strong: the global batch stays."),
    ] = "both",
    steps: Annotated[int, typer.Option(metavar="N", min=2, help="Steps to measure, after the warm-up.")] = 20,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="For the short run of each count.")] = 600,
    min_gain: Annotated[
        float, typer.Option(metavar="PCT", min=0, help="What each added GPU has to bring, of one GPU's work.")
    ] = 50,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also draw the speed-ups.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure the job on several counts of GPUs, in short runs that leave nothing behind (TMPDIR says where)."""
    import tempfile

    from trainwright.job.loading import load_job
    from trainwright.scaling.cases import MODES
    from trainwright.scaling.plot import plot as draw
    from trainwright.scaling.plot import require_plottable
    from trainwright.scaling.scaling_run import ScalingFlags, scale
    from trainwright.scaling.scaling_text import explain, to_json

    if plot is not None:
        require_plottable(plot)
    asked = ScalingFlags(
        counts=gpus,
        modes=MODES if mode == "both" else (mode,),
        steps=steps,
        timeout_s=timeout,
        least_gain_pct=min_gain,
    )
    with tempfile.TemporaryDirectory(prefix="trainwright-scaling-") as place:
        measured = scale(load_job(job, overrides or ()), asked, Path(place).resolve())
    if as_json:
        typer.echo(json.dumps(to_json(measured), indent=2, sort_keys=True))
    else:
        for line in explain(measured):
            typer.echo(line)
    if plot is not None:
        draw(measured, plot)
        typer.echo(f"wrote {plot}", err=True)

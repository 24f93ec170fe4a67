"""`trainwright plan`: what fits, how long it takes, what to ask for; before any GPU is touched."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.errors import ExitCode, UserError


def plan(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job file, or preset:NAME.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Values laid over the job.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="SPEC",
            help="This machine's (0,1, UUIDs, MIG ids), or others written down (a100-80gb:2,v100-32gb:2,host=64gib).",
        ),
    ] = None,
    inventory: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="GPUs of another machine: what `trainwright gpus --json` printed there."),
    ] = None,
    goal: Annotated[
        str, typer.Option(metavar="GOAL", help="soonest, fastest, cheapest (GPU-hours) or fewest-gpus.")
    ] = "soonest",
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Training samples; counted in data.path where left out.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens-per-sample", metavar="N", min=1, help="Average; data.max_length where left out."),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Rank what could be asked of this Slurm cluster, by wait and run together.")
    ] = False,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="With --slurm: only this partition.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="With --slurm: the account to ask with.")] = None,
    qos: Annotated[str | None, typer.Option(metavar="NAME", help="With --slurm: the quality of service.")] = None,
    gpu_type: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE=MODEL", help="With --slurm: what a type of the cluster's is (a100=a100-80gb)."),
    ] = None,
    trace: Annotated[
        bool | None,
        typer.Option(
            "--trace/--no-trace",
            show_default=False,
            help="Hold the best layouts to a traced step, some seconds each; a model without closed form always is.",
        ),
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What torch told of the model elsewhere: the file that such a plan named."),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write accelerate, DeepSpeed and torchrun files there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Rank every layout of the job on the GPUs there are, or could be, by estimated memory and time.

    Ends with exit code 3 where nothing fits, and with 4 where it is not known whether anything does.
    """
    of_slurm = {"--partition": partition, "--account": account, "--qos": qos, "--gpu-type": gpu_type}
    if slurm:
        elsewhere = {
            "--gpus": gpus,
            "--inventory": inventory,
            "--write": write,
            "--goal": goal != "soonest",
            "--trace": trace,
            "--recording": recording,
        }
        _refuse("do not go with `--slurm`, which ranks the cluster's GPUs by finish time", elsewhere)
        _plan_slurm(
            job,
            overrides or (),
            as_json,
            partition=partition,
            account=account,
            qos=qos,
            gpu_types=gpu_type or (),
            samples=samples,
            tokens_per_sample=tokens,
        )
        return
    _refuse("are for a Slurm cluster: add --slurm", of_slurm)
    from trainwright.job.loading import load_job
    from trainwright.launch.planning import PlanFlags, plan_job
    from trainwright.plan.explain import explain

    asked = PlanFlags(
        gpus=gpus,
        inventory=inventory,
        goal=goal,
        samples=samples,
        tokens_per_sample=tokens,
        trace=trace,
        recording=recording,
    )
    planned, made, amount = plan_job(load_job(job, overrides or ()), asked)
    if as_json:
        document = made.to_json() | {"goal": goal, "claims": planned.claims}
        typer.echo(json.dumps(document, indent=2, sort_keys=True))
    else:
        for line in explain(planned, made, amount):
            typer.echo(line)
    if write is not None:
        from trainwright.launch.files.plan_folder import write_files

        for path in write_files(write, planned, made):
            typer.echo(f"wrote {path}", err=True)
    if not made.is_known:
        raise typer.Exit(ExitCode.MISSING)


def _plan_slurm(job: str, overrides: Sequence[str], as_json: bool, **flags: Any) -> None:
    from trainwright.job.loading import load_job
    from trainwright.launch.slurm.planning import AskedSlurm, plan_on_slurm
    from trainwright.plan.slurm.explain import explain_requests

    loaded = load_job(job, overrides)
    made = plan_on_slurm(loaded, AskedSlurm(**flags))
    if as_json:
        typer.echo(json.dumps(made.to_json(), indent=2, sort_keys=True))
    else:
        for line in explain_requests(loaded.job, made):
            typer.echo(line)
    if not made.best.planned.plan.is_known:
        raise typer.Exit(ExitCode.MISSING)


def _refuse(why: str, flags: Mapping[str, object]) -> None:
    """Raise UserError where any of the flags is given."""
    given = [flag for flag, value in flags.items() if value]
    if given:
        raise UserError(f"{', '.join(given)} {why}")

"""`trainwright train`: start, resume or find finished."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job file, or preset:NAME.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Values laid over the job.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="LIST", help="Which GPUs: 0,1 (indices, UUIDs, MIG ids).")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="[PATH]", help="Go on from the newest whole checkpoint, which must exist, or from PATH."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start again; the old run folder is kept aside.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write every file, print each command, run none.")] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A key whose change a resume may take: train.global_batch_size."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(metavar="N", min=0, help="Restarts without a new checkpoint after a rank was killed.")
    ] = 3,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="HOST,HOST", help="Train on several machines over ssh; the first is this one."),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(metavar="R", help="This machine's number, where the command is started on each: 0, 1.")
    ] = None,
    nnodes: Annotated[int | None, typer.Option(metavar="N", help="How many machines; with --node-rank.")] = None,
    rdzv: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address of machine 0 and a free port there; with --node-rank."),
    ] = None,
) -> None:
    """Train the job: the same command starts it, resumes it, or says that it is finished."""
    from trainwright.doctor.before.check_order import short_check
    from trainwright.doctor.before.check_result import lines_of
    from trainwright.job.loading import load_job
    from trainwright.launch.run_output import tell
    from trainwright.launch.train_run import TrainOptions
    from trainwright.launch.train_run import train as run

    options = TrainOptions(
        gpus=gpus,
        resume=resume,
        fresh=fresh,
        dry_run=dry_run,
        allow=tuple(allow or ()),
        max_restarts=max_restarts,
        asked=(job, *(overrides or ())),
    )
    loaded = load_job(job, overrides or ())
    for line in lines_of(short_check(loaded)):
        tell(line)
    by_hand = (node_rank, nnodes, rdzv) != (None, None, None)
    if nodes is None and not by_hand:
        raise typer.Exit(run(loaded, options))
    from trainwright.errors import UserError
    from trainwright.launch.manual_nodes import one_of_nodes, train_on_this_node
    from trainwright.launch.ssh import hosts_of, train_on_hosts

    if nodes is None:
        raise typer.Exit(train_on_this_node(loaded, one_of_nodes(node_rank, nnodes, rdzv), options))
    if by_hand:
        raise UserError("`--nodes` starts each machine, and `--node-rank` is one of them", hints=["leave one out"])
    raise typer.Exit(train_on_hosts(loaded, hosts_of(nodes), options))


def with_resume_value(arguments: list[str]) -> list[str]:
    """Return the command line with `--resume` spelled `--resume=latest` where no checkpoint folder follows it."""
    spelled = []
    for index, argument in enumerate(arguments):
        follows = arguments[index + 1] if index + 1 < len(arguments) else ""
        bare = argument == "--resume" and not Path(follows or "-").is_dir()
        spelled.append("--resume=latest" if bare else argument)
    return spelled

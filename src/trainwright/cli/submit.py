"""`trainwright submit`: a job into Slurm's queue, with a script that brings it to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def submit(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job file, or preset:NAME.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Values laid over the job.")
    ] = None,
    gres: Annotated[
        str | None,
        typer.Option(metavar="GPUS", help="GPUs of each node: gpu:a100:2, or gpu:4 for any; soonest if left out."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Nodes; 1 if left out.")] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="The cluster's default if left out.")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Minutes, or 24:00:00; the partition's limit if left out.")
    ] = None,
    memory_gib: Annotated[
        int | None, typer.Option(metavar="GIB", min=1, help="Memory of each node; the GPUs' share if left out.")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Cores of each node; the GPUs' share if left out.")
    ] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Account to charge.")] = None,
    qos: Annotated[str | None, typer.Option(metavar="NAME", help="Quality of service.")] = None,
    constraint: Annotated[
        str | None, typer.Option(metavar="FEATURES", help="Features that the nodes must have.")
    ] = None,
    chain: Annotated[
        int, typer.Option(metavar="N", min=1, help="Submit N jobs, each after the one before, for short limits.")
    ] = 1,
    if_refused: Annotated[
        Literal["keep", "cancel"],
        typer.Option(help="What becomes of a chain's earlier jobs where Slurm refuses a later one."),
    ] = "keep",
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The site's own script, with {{ directives }} and {{ launch }}.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A key whose change a resume may take: train.global_batch_size."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the script and print it; submit nothing.")] = False,
) -> None:
    """Submit the job to Slurm and print the job id; it goes on after preemption, a time limit or a lost node."""
    from trainwright.job.loading import load_job
    from trainwright.launch.run_output import tell
    from trainwright.launch.slurm import submission
    from trainwright.launch.slurm.asking import Flags, asked_request
    from trainwright.plan.explain import seconds

    flags = Flags(
        gres=gres,
        partition=partition,
        nodes=nodes,
        time=time,
        memory_gib=memory_gib,
        cpus=cpus,
        account=account,
        qos=qos,
        constraint=constraint,
    )
    loaded = load_job(job, overrides or ())
    request, cluster, wait = asked_request(loaded, flags)
    asked = submission.new_submission(loaded, request, cluster, wait, allow=allow or (), links=chain)
    text = submission.submission_script(asked, template)
    with submission.submitting(asked.folder):
        script = submission.write_submission(asked, text)
        tell(f"Run folder: {asked.folder.path}")
        tell(f"Request: {' '.join(request.options())}")
        submission.tell_lead(asked.lead)
        if wait.wait_s is not None:
            tell(f"Expected wait: {seconds(wait.wait_s)} ({wait.reason})")
        if dry_run:
            typer.echo(text, nl=False)
            tell(f"wrote {script}; submit it with: sbatch {script}")
            return
        for job_id in submission.submit(asked, chain, if_refused):
            typer.echo(job_id)
    tell(f"Follow it: trainwright logs -f {asked.folder.path}")

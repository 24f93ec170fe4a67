"""Several nodes without Slurm: this machine is the first, and starts a launcher on each of the others over ssh.

`python -m trainwright.launch.ssh HOST NODES.json RANK` is one such connection. The nodes share the file system of the
run folder, and the environment that this program runs in has the same path on all of them. The remote command is
fixed text and the path of one file; no value of a job is in it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.choice import Choice
from trainwright.hardware.local import local_inventory
from trainwright.job.loading import LoadedJob
from trainwright.job.schema import Job
from trainwright.launch.multi_node import built_in_trainer, on_nodes
from trainwright.launch.node import NodeLaunch, torchrun_options
from trainwright.launch.own_script.script_run import script_ranks
from trainwright.launch.planning import given_keys
from trainwright.launch.processes import STOP_SIGNALS
from trainwright.launch.run_output import tell
from trainwright.launch.supervision import POLL_S, StopAsked
from trainwright.launch.train_run import TrainOptions, only_show, plan_on, run_planned
from trainwright.plan.choose import Plan
from trainwright.plan.requirements import require_runnable
from trainwright.runs.folder import RunFolder
from trainwright.runs.kill_domain import die_with_launcher

HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}@)?[A-Za-z0-9](?:[A-Za-z0-9.:-]{0,251}[A-Za-z0-9])?", re.ASCII)
"""A host name or an address, with a user before it or not; nothing that ssh could take for an option."""


def hosts_of(text: str) -> tuple[str, ...]:
    """Return the hosts of `--nodes host1,host2`.

    Raises:
        UserError: fewer than two, one named twice, or what is no host's name; all of it at once.
    """
    hosts = tuple(text.split(","))
    problems = [f"{host!r} is no host name or address" for host in hosts if not HOST.fullmatch(host)]
    problems += [f"{host} is named twice" for host in sorted({host for host in hosts if hosts.count(host) > 1})]
    if len(hosts) < 2:
        problems.append("one node needs no `--nodes`")
    if problems:
        raise UserError("--nodes names no nodes to train on", problems=problems, hints=["--nodes host1,host2"])
    return hosts


def train_on_hosts(loaded: LoadedJob, hosts: Sequence[str], options: TrainOptions) -> ExitCode:
    """Bring the job's run to its end, or to a clean stop, on these hosts; the first is this machine.

    Raises:
        UserError: the job cannot run here, a host cannot be reached, or a resume would break the contract.
    """
    if options.gpus is not None:
        raise UserError("`--gpus` names GPUs of this machine, and `--nodes` several", hints=["leave one of them out"])
    address = own_address(hosts[0])
    job, plan = plan_for_nodes(loaded, len(hosts))
    folder = RunFolder(Path(job.output_dir) / job.name)
    if options.dry_run:
        file = folder.attempt_dir(1) / "nodes.json"
        on_others = [shlex.join(ssh_command(host, file, rank)) for rank, host in enumerate(hosts) if rank]
        return only_show(folder, job, plan, [shlex.join(node_command(file, 0)), *on_others])
    command_of = built_in_trainer if job.script is None else script_ranks(job, plan, len(hosts))
    stop = StopAsked()
    with stop.listening():
        start_ranks = on_nodes(len(hosts), address, partial(_starters, hosts), command_of=command_of)
        return run_planned(folder, job, plan, options, stop, start_ranks=start_ranks)


def plan_for_nodes(loaded: LoadedJob, nodes: int) -> tuple[Job, Plan]:
    """Return the job with its global batch settled and the plan for so many nodes like this one."""
    job = loaded.job
    require_runnable(job)
    inventory = local_inventory(job.resources.device)
    here = inventory.usable
    if here[0].kind != "cuda":
        asked = job.resources.ranks
        ranks = nodes if asked == "auto" else asked
        job = job.model_copy(update={"resources": job.resources.model_copy(update={"ranks": ranks})})
    devices = [dataclasses.replace(device, node=node) for node in range(nodes) for device in here]
    job, plan = plan_on(job, given_keys(loaded), inventory, devices, may_leave_idle=False)
    choice = Choice(nodes, "given; the others are taken to be like this one")
    return job, dataclasses.replace(plan, choices=plan.choices | {"nodes": choice})


def own_address(host: str) -> str:
    """Return the address of the first host, which must be this machine's: it holds the meeting point."""
    name = host.rpartition("@")[2]
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise UserError(
            f"{name} is not an address of this machine: {error.strerror or error}",
            hints=["run this on the first of the nodes, and name it by the address that the others reach it by"],
        ) from error
    return address


def _starters(hosts: Sequence[str], file: Path) -> list[list[str]]:
    """Return what starts the launcher of each node: here as it is, elsewhere over ssh."""
    launch = NodeLaunch.read(file)
    for rank, host in enumerate(hosts):
        address = launch.address if rank == 0 else host.rpartition("@")[2]
        tell(f"{host}: {shlex.join(['torchrun', *torchrun_options(launch, rank, address)])}")
    others = [
        [sys.executable, "-m", "trainwright.launch.ssh", host, str(file), str(rank)]
        for rank, host in enumerate(hosts)
        if rank
    ]
    return [node_command(file, 0), *others]


def node_command(file: Path, rank: int) -> list[str]:
    """Return what starts the launcher of a node on that node."""
    return [sys.executable, "-m", "trainwright.launch.node", str(file), f"--node-rank={rank}"]


def ssh_command(host: str, file: Path, rank: int) -> list[str]:
    """Return the ssh command for a node; with a terminal of its own, so that the node ends with the connection."""
    options = ["-tt", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15"]
    return ["ssh", *options, "--", host, shlex.join(node_command(file, rank))]


def main(arguments: Sequence[str]) -> int:
    """Hold one connection until its node has ended; a request to stop goes to the node through its file."""
    die_with_launcher()
    host, file, rank = arguments[0], Path(arguments[1]), int(arguments[2])
    launch = NodeLaunch.read(file)
    del os.environ["TRAINWRIGHT_LAUNCHER_PID"]  # the launcher of ssh is this process
    bound = die_with_launcher if sys.platform == "linux" else None
    stop = StopAsked(most=1)
    with stop.listening():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        connection = subprocess.Popen(ssh_command(host, file, rank), stdin=subprocess.DEVNULL, preexec_fn=bound)
        while connection.poll() is None:
            if stop.times:
                launch.stop_file(rank).touch(mode=0o600)
            time.sleep(POLL_S)
    return connection.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

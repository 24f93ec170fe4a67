"""The launcher of one node: `python -m trainwright.launch.node FILE.json [--node-rank N]`.

FILE.json is the same for every node and lies where all of them see it. Under Slurm the number of the node is
SLURM_NODEID, which stands in the task's own environment and not in the batch script's (T-07).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import socket
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trainwright.errors import ExitCode, UserError
from trainwright.launch.hangs.evidence import answer_other_machine
from trainwright.launch.processes import COLLATERAL_GRACE_S, STOP_SIGNALS, Processes
from trainwright.launch.sampling import Alerts, sampling
from trainwright.launch.supervision import POLL_S, StopAsked
from trainwright.runs.folder import RunFolder
from trainwright.runs.kill_domain import die_with_launcher
from trainwright.runs.writing import read_json, write_json_atomic

AGENT = "trainwright.train.agent"


@dataclass(frozen=True, kw_only=True)
class NodeLaunch:
    """What every node of one attempt is told.

    `address` and `port` are where node 0 holds torchrun's rendezvous, `rendezvous_id` is this attempt's own. `command`
    is what torchrun starts in each rank, as a module (`-m`, name, ...) or a script. The folder of the attempt in the
    run folder `run` gets the log of each node's torchrun and the exit statuses of its ranks.
    """

    nodes: int
    ranks_per_node: int
    address: str
    port: int
    rendezvous_id: str
    command: tuple[str, ...]
    environment: dict[str, str]
    run: str
    attempt: int

    def write(self, path: Path) -> None:
        """Write the file that the nodes read."""
        write_json_atomic(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> NodeLaunch:
        """Return what `write` wrote."""
        content: dict[str, Any] = read_json(path)
        return cls(**content | {"command": tuple(content["command"])})

    @property
    def records(self) -> Path:
        """Where this attempt's files are."""
        return RunFolder(self.run).attempt_dir(self.attempt)

    def log(self, node_rank: int) -> Path:
        """Return the log of a node's torchrun."""
        return self.records / f"node_{node_rank}.log"

    def stop_file(self, node_rank: int) -> Path:
        """Return the file that asks a node to stop where no signal reaches it."""
        return self.records / f"node_{node_rank}.stop"

    def record(self, node_rank: int) -> Path:
        """Return where the exit statuses of a node's failed ranks are written."""
        return self.records / f"node_{node_rank}.json"


def torchrun_options(launch: NodeLaunch, node_rank: int, local_address: str) -> list[str]:
    """Return what torchrun is told on a node; its ranks are started once, a restart is a new attempt.

    They are those of its static rendezvous, in which nothing is unpickled.
    """
    return [
        f"--nnodes={launch.nodes}",
        f"--nproc-per-node={launch.ranks_per_node}",
        f"--node-rank={node_rank}",
        f"--master-addr={launch.address}",
        f"--master-port={launch.port}",
        f"--rdzv-id={launch.rendezvous_id}",
        f"--local-addr={local_address}",
        "--max-restarts=0",
        *launch.command,
    ]


def run_node(launch: NodeLaunch, node_rank: int) -> ExitCode:
    """Run this node's ranks to their end, sample the node, and pass on to the ranks what asks this process to stop.

    The first node is sampled by whoever supervises the run, which goes on there.
    """
    local_address = address_towards(launch.address)
    environment = launch.environment | _interface(local_address)
    # Slurm may ask several times for one stop, and sends SIGKILL where it means to end all by force.
    stop, processes = StopAsked(most=1), Processes()
    folder = RunFolder(launch.run)
    with stop.listening():
        # ssh's end of the connection: the first node is lost, and with it the ranks that these would wait for.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        # Blocked since before this process began, where the launcher of the first node started it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            options = [str(launch.record(node_rank)), *torchrun_options(launch, node_rank, local_address)]
            processes.start(AGENT, options, environment, launch.log(node_rank))
            asked: set[int] = set()
            answered_ns = 0
            with _sampling_further(launch, node_rank) as alerts:
                while processes.running:
                    answered_ns = answer_other_machine(folder, launch.attempt, answered_ns)
                    if stop.times and not asked:
                        _tell_others(launch, node_rank)
                    if stop.times or launch.stop_file(node_rank).exists():
                        _ask_ranks(processes.children[0].pid, asked)
                    if alerts is not None:
                        alerts.follow()
                    time.sleep(POLL_S)
        finally:
            processes.kill()
    (code,) = processes.exit_codes()
    if code == 0:
        return ExitCode.DONE
    # The other nodes, which srun ends as soon as this one ends, may still be writing down what they felt of it.
    time.sleep(COLLATERAL_GRACE_S)
    return ExitCode.FAILED


def _sampling_further(launch: NodeLaunch, node_rank: int) -> AbstractContextManager[Alerts | None]:
    if node_rank == 0:
        return nullcontext()
    return sampling(RunFolder(launch.run), launch.attempt, node=node_rank)


def address_towards(address: str) -> str:
    """Return the address of this machine by which it reaches `address`; nothing is sent."""
    try:
        family, kind, protocol, _, destination = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(destination)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"{address} cannot be reached from {socket.gethostname()}: {error.strerror or error}",
            hints=[f"look at its name and the way there: getent hosts {address}"],
            exit_code=ExitCode.MISSING,
        ) from error


def _interface(local_address: str) -> dict[str, str]:
    """Name gloo the interface of an address: it would take that of the host name, often loopback."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == local_address for one in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def _tell_others(launch: NodeLaunch, node_rank: int) -> None:
    """Pass a stop on to every node: the ranks of a user's own script do not agree on one, and would wait for ever."""
    for other in range(launch.nodes):
        if other != node_rank:
            with suppress(OSError):  # a full disk, in front of which this node's ranks are to stop all the same
                launch.stop_file(other).touch(mode=0o600)


def _ask_ranks(agent: int, asked: set[int]) -> None:
    """Ask each rank to stop that was not asked yet, those that start only now too.

    torchrun itself is not asked: it would kill its ranks after half a minute, in the middle of a save.
    """
    try:
        for rank in psutil.Process(agent).children():
            if rank.pid not in asked:
                rank.terminate()
                asked.add(rank.pid)
    except psutil.NoSuchProcess:
        return


def main() -> ExitCode:
    """Run the node that the command line or Slurm names."""
    parser = argparse.ArgumentParser(prog="python -m trainwright.launch.node")
    parser.add_argument("file", type=Path)
    parser.add_argument("--node-rank", type=int, default=os.environ.get("SLURM_NODEID"))
    options = parser.parse_args()
    if os.environ.get("TRAINWRIGHT_LAUNCHER_PID") == str(os.getppid()):
        die_with_launcher()  # a command of this machine; srun and ssh end their own
    if options.node_rank is None:
        parser.error("--node-rank is needed outside of Slurm")
    return run_node(NodeLaunch.read(options.file), options.node_rank)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error.render(), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)

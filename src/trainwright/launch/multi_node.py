"""The ranks of one attempt on several nodes: a launcher on each, watched from the process that holds the run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from trainwright.errors import ExitCode, UserError
from trainwright.launch.failures import Failure, read_failures
from trainwright.launch.files.nodes import Nodes
from trainwright.launch.node import NodeLaunch
from trainwright.launch.processes import Processes
from trainwright.launch.supervision import StartRanks, rank_environment
from trainwright.plan.layout import Layout
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import read
from trainwright.runs.writing import read_json

END_S = 15.0
"""How long the launchers may take to end once told so, before their starters are killed."""

CommandOf: TypeAlias = Callable[[RunFolder, int], tuple[str, ...]]
"""Returns what torchrun starts in each rank of an attempt, given its number."""
StarterOf: TypeAlias = Callable[[Path], Sequence[Sequence[str]]]
"""Returns the commands that start the launchers of all nodes (one `srun`, or one `ssh` a node), given their file."""


@dataclass(kw_only=True)
class NodeLaunchers(Processes):
    """Commands that start the launchers of all nodes, in the place of ranks."""

    folder: RunFolder
    attempt: int
    launch: NodeLaunch
    stop_signal: signal.Signals | None
    reserved: socket.socket | None = None

    @property
    def _ranks(self) -> int:
        return self.launch.nodes * self.launch.ranks_per_node

    def exit_codes(self) -> list[int | None]:
        """Return the exit status of each rank; of a failed attempt, of those that failed first on their node."""
        if self.running:
            return [None] * self._ranks
        failed = self._failed()
        if not failed and not self.failed:
            return [ExitCode.STOPPED if self._stopped() else ExitCode.DONE] * self._ranks
        return [failed.get(rank) for rank in range(self._ranks)]

    def failures(self, attempt_dir: Path) -> list[Failure]:
        """Return the failures of ranks.

        Raises:
            UserError: a launcher failed and no rank did.
        """
        found = read_failures(attempt_dir, self.exit_codes(), self.killed)
        if found or self.killed:
            return found
        logs = [self.launch.log(node) for node in range(self.launch.nodes)]
        said = {log.name: log.read_text(errors="replace").strip().splitlines() for log in logs if log.exists()}
        raise UserError(
            "the ranks did not start, or were lost with their node",
            problems=[f"{name}: {lines[-1]}" for name, lines in said.items() if lines],
            hints=[f"the launchers' logs are in {attempt_dir}"],
            exit_code=ExitCode.FAILED,
        )

    def ask_to_stop(self) -> None:
        """Ask every node's launcher to have its ranks save and end."""
        if self.stop_signal is None:
            for node in range(self.launch.nodes):
                self.launch.stop_file(node).touch(mode=0o600)
            return
        for child in self.children:
            if child.poll() is None:
                child.send_signal(self.stop_signal)

    def kill(self) -> None:
        """End every launcher with all that it started, and give back the port."""
        for number, child in enumerate(self.children):
            if child.poll() is None:
                self.killed.add(number)
                # srun and ssh have to take their tasks with them, which a SIGKILL would not let them.
                child.terminate()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(END_S)
        super().kill()
        if self.reserved is not None:
            self.reserved.close()

    def _failed(self) -> dict[int, int]:
        records = [self.launch.record(node) for node in range(self.launch.nodes)]
        return {int(rank): code for path in records if path.exists() for rank, code in read_json(path).items()}

    def _stopped(self) -> bool:
        ends = [e for e in read(self.folder.events_jsonl) if e.get("attempt") == self.attempt]
        return any(event["event"] == "stopped" for event in ends)


def built_in_trainer(folder: RunFolder, attempt: int) -> tuple[str, ...]:
    """Return a rank of the built-in trainer; the number of the attempt is in its environment."""
    return ("-m", "trainwright.train.under_torchrun", str(folder.path))


def on_nodes(
    nodes: int,
    address: str,
    starters: StarterOf,
    *,
    port: int = 0,
    stop_signal: signal.Signals | None = signal.SIGTERM,
    command_of: CommandOf = built_in_trainer,
) -> StartRanks:
    """Return what starts the ranks of an attempt on `nodes` machines, of which the first has this address.

    `stop_signal` is what their starters pass on to the launchers, None where these are asked by a file instead.

    Each attempt has a meeting of its own: an id that no other has, and a port (any free one where 0 is given) that is
    kept from others where the first machine is this one.
    """

    def start(folder: RunFolder, layout: Layout, attempt: int) -> Processes:
        each = Nodes(nodes, layout.ranks // nodes)
        each.require(layout)
        reserved, reserved_port = reserve_port(address, port)
        records = folder.attempt_dir(attempt)
        told = rank_environment(layout, each.ranks_per_node, attempt)
        if nodes > 1 and layout.device == "cuda":
            del told["CUDA_VISIBLE_DEVICES"]  # names the GPUs of the first node; each has those that it was given
        launch = NodeLaunch(
            nodes=nodes,
            ranks_per_node=each.ranks_per_node,
            address=address,
            port=reserved_port,
            rendezvous_id=f"{folder.run_id[:12]}-{attempt}-{os.urandom(4).hex()}",
            command=command_of(folder, attempt),
            environment=told,
            run=str(folder.path.absolute()),
            attempt=attempt,
        )
        file = records / "nodes.json"
        launch.write(file)
        folder.rank_log(attempt, 0).touch(mode=0o600)
        launchers = NodeLaunchers(
            folder=folder, attempt=attempt, launch=launch, stop_signal=stop_signal, reserved=reserved
        )
        for command in starters(file):
            launchers.start_command(command, {}, records / "launchers.log")
        return launchers

    return start


def reserve_port(address: str, port: int = 0) -> tuple[socket.socket, int]:
    """Return a port of this machine, and the socket that keeps it from others until torchrun listens on it and after.

    `port` 0 is any that is free.

    Linux lets a second socket listen where the first is only bound, if both say SO_REUSEADDR, as torch's store does;
    nobody else is given the port meanwhile.
    """
    socket_here = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        socket_here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        socket_here.bind((address, port))
    except OSError as error:
        socket_here.close()
        if not port:
            raise
        raise UserError(
            f"port {port} of {address} cannot be had: {error.strerror}",
            hints=["name one that is free: --rdzv HOST:PORT"],
        ) from error
    return socket_here, int(socket_here.getsockname()[1])

"""Several nodes, each started by hand with the same command and its own number: `train JOB --node-rank R ...`.

Node 0 holds the run as on one machine. The others plan nothing: they read in the run folder, which all share, which
attempt to take part in and how the run ended. Node 0 writes that again every few seconds, so that they can tell a word
of now from one that a killed command has left, without comparing clocks.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from trainwright.errors import ExitCode, UserError
from trainwright.job.loading import LoadedJob
from trainwright.launch.multi_node import built_in_trainer, on_nodes
from trainwright.launch.node import NodeLaunch, address_towards, torchrun_options
from trainwright.launch.own_script.script_run import script_ranks
from trainwright.launch.processes import Processes
from trainwright.launch.run_output import tell
from trainwright.launch.ssh import HOST, node_command, own_address, plan_for_nodes
from trainwright.launch.supervision import POLL_S, StopAsked
from trainwright.launch.train_run import TrainOptions, only_show, run_planned
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.writing import read_json, write_json_atomic

BEAT_S = 2.0
FIRST_WORD_S = 600.0
"""How long another node waits to hear of node 0 for the first time; torchrun waits as long for its nodes."""
SILENCE_S = 180.0
"""How long it waits for the next word; an NFS client may take a minute to see one."""
LEAVING_S = 30.0
"""How long the ranks of a node may take to end once the run has gone on without them."""
_MEETING = re.compile(r"(?:\[(?P<bracketed>[^\]@]+)\]|(?P<host>[^:@]+)):(?P<port>[0-9]{1,5})", re.ASCII)


@dataclass(frozen=True)
class OneOfNodes:
    """Which node this is, of how many, and where torchrun's rendezvous is: on node 0."""

    rank: int
    nodes: int
    host: str
    port: int


def one_of_nodes(rank: int | None, nodes: int | None, meeting: str | None) -> OneOfNodes:
    """Return what `--node-rank R --nnodes N --rdzv HOST:PORT` say.

    Raises:
        UserError: one of them is missing or wrong; all of it at once.
    """
    given = {"--node-rank": rank, "--nnodes": nodes, "--rdzv": meeting}
    problems = [f"{flag} is missing" for flag, value in given.items() if value is None]
    if nodes is not None and nodes < 2:
        problems.append("one node needs none of these")
    elif rank is not None and nodes is not None and not 0 <= rank < nodes:
        problems.append(f"--node-rank {rank}: the nodes are 0 to {nodes - 1}")
    address = None if meeting is None else _host_and_port(meeting)
    if meeting is not None and address is None:
        problems.append(f"--rdzv {meeting!r}: not HOST:PORT, an address of node 0 and a free port there")
    if problems:
        raise UserError(
            "this node is not told which one it is",
            problems=problems,
            hints=["on each node, with its own number: --node-rank 0 --nnodes 2 --rdzv 10.0.0.1:29500"],
        )
    assert rank is not None and nodes is not None and address is not None
    return OneOfNodes(rank, nodes, *address)


def _host_and_port(meeting: str) -> tuple[str, int] | None:
    match = _MEETING.fullmatch(meeting)
    if match is None:
        return None
    host, port = match["bracketed"] or match["host"], int(match["port"])
    return (host, port) if HOST.fullmatch(host) and 0 < port < 65536 else None


def train_on_this_node(loaded: LoadedJob, me: OneOfNodes, options: TrainOptions) -> ExitCode:
    """Bring the job's run to its end, or to a clean stop, together with the same command on the other nodes.

    Raises:
        UserError: the job cannot run here, a resume would break the contract, or node 0 is not heard of.
    """
    if options.gpus is not None:
        raise UserError("`--gpus` names GPUs of this machine, and the nodes are alike", hints=["leave it out"])
    folder = RunFolder(Path(loaded.job.output_dir) / loaded.job.name)
    if me.rank == 0:
        return _hold_run(loaded, folder, me, options)
    if options.dry_run:
        print(_command(folder, me))
        return ExitCode.DONE
    return _take_part(folder, me)


def _command(folder: RunFolder, me: OneOfNodes) -> str:
    return shlex.join(node_command(folder.attempt_dir(1) / "nodes.json", me.rank))


def _hold_run(loaded: LoadedJob, folder: RunFolder, me: OneOfNodes, options: TrainOptions) -> ExitCode:
    address = own_address(me.host)
    job, plan = plan_for_nodes(loaded, me.nodes)
    if options.dry_run:
        return only_show(folder, job, plan, [_command(folder, me)])
    command_of = built_in_trainer if job.script is None else script_ranks(job, plan, me.nodes)
    stop = StopAsked()
    folder.create()
    with stop.listening(), RunLock(folder), _speaking(folder) as word:
        start_ranks = on_nodes(me.nodes, address, partial(_starters, word), port=me.port, command_of=command_of)
        code = run_planned(folder, job, plan, options, stop, start_ranks=start_ranks, lock=nullcontext())
        word.exit_code = code
    return code


@dataclass
class _Word:
    """What node 0 tells the others: the file of the attempt to take part in, and how the run ended."""

    session: str = field(default_factory=lambda: os.urandom(8).hex())
    beat: int = 0
    launch: str | None = None
    exit_code: int | None = None

    def write(self, folder: RunFolder) -> None:
        self.beat += 1
        folder.launcher_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json_atomic(folder.first_node_json, dataclasses.asdict(self))


@contextmanager
def _speaking(folder: RunFolder) -> Iterator[_Word]:
    """Tell the other nodes how the run stands, again and again until it ends."""
    word, ended = _Word(), threading.Event()

    def speak() -> None:
        while not ended.wait(BEAT_S):
            with suppress(OSError):  # a file system that fails for a moment; the others wait longer than that
                word.write(folder)

    word.write(folder)
    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield word
    except UserError as error:
        word.exit_code = error.exit_code
        raise
    finally:
        ended.set()
        speaker.join()
        if word.exit_code is None:
            word.exit_code = ExitCode.FAILED
        word.write(folder)


def _starters(word: _Word, file: Path) -> list[list[str]]:
    launch = NodeLaunch.read(file)
    _show(launch, 0, launch.address)
    word.launch = str(file)
    return [node_command(file, 0)]


def _show(launch: NodeLaunch, rank: int, local_address: str) -> None:
    tell(f"node {rank}: {shlex.join(['torchrun', *torchrun_options(launch, rank, local_address)])}")


def _take_part(folder: RunFolder, me: OneOfNodes) -> ExitCode:
    """Run this node's ranks in each attempt that node 0 opens; return how the run ended."""
    stop, listening = StopAsked(most=1), _Listening(folder)
    launch, processes, asked = None, Processes(), False
    tell(f"node {me.rank}: waiting for node 0 to open an attempt of {folder.path}")
    with stop.listening():
        try:
            while True:
                word = listening.word()
                if word is not None and word.exit_code is not None:
                    _leave(processes)
                    return ExitCode(word.exit_code)
                if word is not None and word.launch not in (None, launch):
                    _leave(processes)
                    launch, processes, asked = word.launch, _join(folder, Path(word.launch), me), False
                if stop.times and launch is None:
                    return ExitCode.STOPPED
                if stop.times and not asked:
                    tell("stopping: every rank saves at the next step boundary")
                    processes.ask_to_stop()
                    asked = True
                time.sleep(POLL_S)
        finally:
            processes.kill()


def _join(folder: RunFolder, file: Path, me: OneOfNodes) -> Processes:
    launch = NodeLaunch.read(file)
    _show(launch, me.rank, address_towards(launch.address))
    processes = Processes()
    processes.start_command(node_command(file, me.rank), {}, file.parent / "launchers.log")
    return processes


def _leave(processes: Processes) -> None:
    """Wait for the end of the ranks of an attempt that is over, and end those that do not notice."""
    deadline_s = time.monotonic() + LEAVING_S
    while processes.running and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    processes.kill()


class _Listening:
    """What node 0 says, from when it is first heard: a word that stood there before and never changes is nobody's."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._last = self._read()
        self._heard = False
        self._since_s = time.monotonic()

    def word(self) -> _Word | None:
        """Return the newest word, None before the first.

        Raises:
            UserError: there was none for too long.
        """
        now = self._read()
        if now != self._last:
            self._last, self._heard, self._since_s = now, True, time.monotonic()
        elif time.monotonic() - self._since_s > (SILENCE_S if self._heard else FIRST_WORD_S):
            raise UserError(
                f"node 0 has not been heard of for {time.monotonic() - self._since_s:.0f} s",
                hints=[
                    "start the same command there with --node-rank 0",
                    f"{self._folder.path} must lie on a file system that all nodes share",
                ],
                exit_code=ExitCode.FAILED,
            )
        return now if self._heard else None

    def _read(self) -> _Word | None:
        try:
            return _Word(**read_json(self._folder.first_node_json))
        except FileNotFoundError:
            return None

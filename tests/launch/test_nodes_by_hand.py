"""`train --node-rank`: the same command on each node; they meet by an address and the run folder (S4-49)."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from two_ranks import write_two_ranks

from trainwright.errors import ExitCode, UserError
from trainwright.launch.manual_nodes import OneOfNodes, one_of_nodes
from trainwright.runs.records import read

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from live_run import ledger

PATIENCE_S = 400.0
pytestmark = pytest.mark.timeout(1800)


class StartedNodes:
    """Both nodes' commands in a folder with a job, on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, write_two_ranks(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.meeting = f"127.0.0.1:{probe.getsockname()[1]}"
        self.nodes: list[subprocess.Popen[bytes]] = []

    def start(self, *overrides: str) -> None:
        """Start node 1 and then node 0."""
        self.nodes = [self._start(rank, *overrides) for rank in (1, 0)][::-1]

    def _start(self, rank: int, *overrides: str) -> subprocess.Popen[bytes]:
        place = ["--node-rank", str(rank), "--nnodes", "2", "--rdzv", self.meeting]
        with (self.folder / f"console_{rank}").open("wb") as console:
            return subprocess.Popen(
                [sys.executable, "-m", "trainwright", "train", "job.yaml", *overrides, *place],
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                stdout=console,
                stderr=console,
            )

    def said(self, rank: int) -> str:
        """What the command of a node has printed since its start."""
        return (self.folder / f"console_{rank}").read_text(errors="replace")

    @property
    def all_said(self) -> str:
        """What both have printed."""
        return self.said(0) + self.said(1)

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        """Wait for a condition while both commands live."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert all(node.poll() is None for node in self.nodes), f"ended before {what}:\n{self.all_said}"
            assert time.monotonic() < deadline_s, f"waited {PATIENCE_S:.0f} s for {what}:\n{self.all_said}"
            time.sleep(0.02)

    def ends(self) -> list[int]:
        """Wait for both commands and return their exit statuses."""
        return [node.wait(PATIENCE_S) for node in self.nodes]

    def steps(self, attempt: int) -> list[int]:
        """Return the steps that an attempt has done."""
        return [row["step"] for row in ledger(self.run_dir) if row["attempt"] == attempt]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[StartedNodes]:
    started = StartedNodes(tmp_path)
    yield started
    for node in started.nodes:
        node.kill()
        node.wait()


@pytest.mark.long
def test_two_commands_train_as_one_group_restart_together_stop_together_and_go_on(started: StartedNodes) -> None:
    """A rank that is killed restarts both nodes; a stop of node 1 stops both, exit 75; started again, they finish."""
    started.start()
    started.wait_for("steps", lambda: len(started.steps(1)) > 12)
    ranks_of(started.nodes[1])[1].kill()
    started.wait_for("the next attempt", lambda: len(started.steps(2)) > 2)
    started.nodes[1].send_signal(signal.SIGTERM)
    assert started.ends() == [ExitCode.STOPPED, ExitCode.STOPPED], started.all_said
    last = started.steps(2)[-1]
    assert (started.run_dir / f"checkpoint-{last}").is_dir()
    lines = [line for rank in (0, 1) for line in started.said(rank).splitlines() if ": torchrun --nnodes=2" in line]
    assert [line.partition(":")[0] for line in lines] == ["node 0", "node 0", "node 1", "node 1"]
    address, _, port = started.meeting.rpartition(":")
    assert all({f"--master-addr={address}", f"--master-port={port}"} <= set(shlex.split(line)) for line in lines)

    started.start("checkpoint.every=1000 steps")
    assert started.ends() == [ExitCode.DONE, ExitCode.DONE], started.all_said
    assert f"Resuming from checkpoint-{last}" in started.said(0)
    assert (started.run_dir / "final_model" / "model.safetensors").is_file()
    assert [row["step"] for row in ledger(started.run_dir)] == list(range(1, 241))
    for samples in ("system.jsonl", "system-1.jsonl"):
        assert {sample["attempt"] for sample in read(started.run_dir / samples)} == {1, 2, 3}, "each node is sampled"


def ranks_of(command: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    """Return the processes of the ranks of one node."""
    found = {}
    for process in psutil.Process(command.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RANK" in (environment := process.environ()):
                found[int(environment["RANK"])] = process
    return found


def test_a_dry_run_prints_the_command_of_this_node_and_waits_for_nobody(tmp_path: Path) -> None:
    started = StartedNodes(tmp_path)
    for rank in (1, 0):
        done = started._start(rank, "--dry-run")
        assert done.wait(PATIENCE_S) == 0, started.said(rank)
        assert f"--node-rank={rank}" in started.said(rank).splitlines()[-1]
    assert (started.run_dir / "plan.json").is_file()
    assert not (started.run_dir / "logs" / "attempt_1").exists(), "no attempt was begun"


@pytest.mark.parametrize(
    ("rank", "nodes", "meeting"),
    [
        (2, 2, "10.0.0.1:29500"),
        (-1, 2, "10.0.0.1:29500"),
        (0, 1, "10.0.0.1:29500"),
        (0, 2, "10.0.0.1"),
        (0, 2, "10.0.0.1:0"),
        (0, 2, "10.0.0.1:65536"),
        (0, 2, "-oProxy:29500"),
        (0, 2, "a b:29500"),
        (0, 2, "$(touch x):29500"),
        (0, 2, "me@a:29500"),
        (0, 2, "[me@a]:29500"),
        (0, 2, "a:29500\n"),
        (0, 2, "fe80::1:29500"),
        (None, 2, "a:29500"),
        (0, None, "a:29500"),
        (0, 2, None),
    ],
)
def test_a_place_among_nodes_that_is_wrong_is_refused(rank: int | None, nodes: int | None, meeting: str | None) -> None:
    with pytest.raises(UserError):
        one_of_nodes(rank, nodes, meeting)


def test_a_place_among_nodes_is_read() -> None:
    assert one_of_nodes(1, 2, "node-1.cluster:29500") == OneOfNodes(1, 2, "node-1.cluster", 29500)
    assert one_of_nodes(0, 3, "[fe80::1]:29500") == OneOfNodes(0, 3, "fe80::1", 29500)

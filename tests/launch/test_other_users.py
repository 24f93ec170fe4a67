"""What other users of a machine reach of a job: its ports on one address, and nothing in them that runs their code."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from other_user import Attack, listening, processes_marked
from script_runs import JOINED, ScriptRun
from two_ranks import write_two_ranks

PATIENCE_S = 300.0
pytestmark = pytest.mark.timeout(900)


@dataclass
class JobHere:
    """A job of two ranks of a script on this machine, and the commands that start it."""

    place: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    commands: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def prepare(self, launcher: str) -> None:
        """Write the script and the job."""
        (self.place / "train.py").write_text(JOINED)
        resources = {"ranks": 2}
        ScriptRun(self.place).write_job(["python", "train.py", "{output_dir}"], launcher=launcher, resources=resources)

    def start(self, *command: str, **variables: str) -> None:
        """Start one command of the job."""
        environment = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "MARK": self.mark, **variables}
        with (self.place / "console").open("ab") as console:
            self.commands.append(
                subprocess.Popen(command, cwd=self.place, env=os.environ | environment, stdout=console, stderr=console)
            )

    @property
    def said(self) -> str:
        """What the commands have printed, and the launcher's log."""
        logs = [self.place / "console", *self.place.glob("outputs/own/logs/attempt_*/*.log")]
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')}" for log in logs)

    def wait_until_joined(self) -> None:
        """Wait until both ranks are in one group."""
        deadline_s = time.monotonic() + PATIENCE_S
        while len(list(self.place.glob("outputs/own/output/joined_*"))) < 2:
            assert all(command.poll() is None for command in self.commands), self.said
            assert time.monotonic() < deadline_s, self.said
            time.sleep(0.1)

    def end(self) -> list[int]:
        """Let the script come to its end, and return the exit statuses of the commands."""
        (self.place / "go").touch()
        return [command.wait(PATIENCE_S) for command in self.commands]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[JobHere]:
    here = JobHere(tmp_path)
    try:
        yield here
    finally:
        for command in here.commands:
            command.send_signal(signal.SIGKILL)
            command.wait()


def trained(job: JobHere) -> None:
    job.start(sys.executable, "-m", "trainwright", "train", "job.yaml")


def launched_by_hand(job: JobHere, *arguments: str) -> None:
    """Start launch.sh of the job's plan, as a person would."""
    plan = [sys.executable, "-m", "trainwright", "plan", "job.yaml", "--write", "files"]
    subprocess.run(plan, cwd=job.place, check=True, capture_output=True)
    job.start("bash", "files/launch.sh", *arguments, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def on_two_nodes(job: JobHere) -> None:
    """Start the command of either node, through launch.node, as Slurm and ssh do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        meeting = f"127.0.0.2:{probe.getsockname()[1]}"
    for rank in ("0", "1"):
        place = ["--node-rank", rank, "--nnodes", "2", "--rdzv", meeting]
        job.start(sys.executable, "-m", "trainwright", "train", "job.yaml", *place)


@pytest.mark.parametrize(
    ("launcher", "start", "addresses"),
    [
        ("torchrun", trained, {"127.0.0.1"}),
        ("torchrun", on_two_nodes, {"127.0.0.1", "127.0.0.2"}),
        pytest.param("torchrun", launched_by_hand, {"127.0.0.1"}, marks=pytest.mark.long),
        pytest.param("accelerate", trained, {"127.0.0.1"}, marks=pytest.mark.long),
        pytest.param("accelerate", launched_by_hand, {"127.0.0.1"}, marks=pytest.mark.long),
        pytest.param("deepspeed", trained, {"127.0.0.1"}, marks=pytest.mark.long),
    ],
)
def test_harm_01_another_user_runs_no_code_through_the_ports_of_a_job(
    job: JobHere, launcher: str, start: Callable[[JobHere], None], addresses: set[str]
) -> None:
    """Nothing listens but on the address of the meeting; what nobody writes into the store harms the run alone."""
    job.prepare(launcher)
    start(job)
    job.wait_until_joined()
    places = listening(processes_marked(job.mark))
    assert {address for address, _ in places} <= addresses, places
    attack = Attack(job.place / "canary", places)
    assert any("default_pg" in key for key in attack.keys), "nobody did reach the store, or this test says nothing"
    assert not attack.succeeded, job.said
    assert job.end() == [0] * len(job.commands), job.said


def test_harm_01_the_attack_works_on_torchrun_as_it_comes(tmp_path: Path) -> None:
    """Without this, the test above could pass by an attack that never works."""
    mark = uuid.uuid4().hex
    options = ["--standalone", "--nproc-per-node=1", "--no-python", "sleep", "300"]
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options],
        env=os.environ | {"MARK": mark},
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while not any("300" in process.cmdline()[-1:] for process in psutil.Process(torchrun.pid).children()):
            assert time.monotonic() < deadline_s and torchrun.poll() is None
            time.sleep(0.1)
        places = listening(processes_marked(mark))
        assert Attack(tmp_path / "canary", places).succeeded
        assert {address for address, _ in places} - {"127.0.0.1", "::1"}, "torch's own store is on every interface"
    finally:
        torchrun.terminate()
        torchrun.wait(60)


NO_PICKLES = """
import os
if "RANK" in os.environ:
    import torch.distributed.distributed_c10d as c10d

    def refuse(*_):
        raise AssertionError("a rank unpickles what another has sent")

    c10d._tensor_to_object = refuse
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_harm_01_ranks_of_the_built_in_trainer_unpickle_nothing_of_each_other(tmp_path: Path, strategy: str) -> None:
    """Who takes a rank's place in gloo, whose ports ask nobody who he is, runs no code by what he sends."""
    (tmp_path / "sitecustomize.py").write_text(NO_PICKLES)
    run_dir = write_two_ranks(tmp_path)
    overrides = [f"resources.strategy={strategy}", "train.num_train_epochs=2", "resources.balance=auto"]
    trained = subprocess.run(
        [sys.executable, "-m", "trainwright", "train", "job.yaml", *overrides],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert trained.returncode == 0, trained.stderr
    assert (run_dir / "checkpoint-10").is_dir()

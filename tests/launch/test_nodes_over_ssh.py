"""`train --nodes`: two machines, which are network namespaces here, and an ssh that enters them (S4-49)."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from script_runs import DEADLINE_S, LOOP, LOOP_COMMAND, ScriptRun, wait_until

from trainwright.errors import ExitCode, UserError
from trainwright.launch.ssh import hosts_of, ssh_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_script"


@dataclass(frozen=True)
class TwoHosts:
    """Two network namespaces with a link between them, and a folder with an `ssh` that runs commands in the second."""

    first: str
    addresses: tuple[str, str]
    programs: Path

    def start(self, run: ScriptRun, *arguments: str) -> subprocess.Popen[str]:
        """Start `trainwright train job.yaml --nodes ...` on the first host."""
        command = [sys.executable, "-m", "trainwright", "train", "job.yaml", "--nodes", ",".join(self.addresses)]
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            ["ip", "netns", "exec", self.first, *command, *arguments],
            cwd=run.place,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        if os.environ.get("REQUIRE_NAMESPACES"):
            pytest.fail("REQUIRE_NAMESPACES is set, and this is not root with `ip` (iproute2)")
        pytest.skip("needs root and `ip`: hosts are network namespaces")
    number = os.getpid() % 30_000
    first, second = f"tw{number}a", f"tw{number}b"
    network = f"10.{210 + number // 250 % 40}.{number % 250}"
    addresses = (f"{network}.1", f"{network}.2")
    programs = tmp_path_factory.mktemp("programs")
    ssh = programs / "ssh"
    # As sshd does: the command is a line for a shell, which is not in the folder of who asked.
    ssh.write_text(
        f'#!/bin/bash\nwhile [[ $1 != -- ]]; do shift; done\n[[ $2 == {addresses[1]} ]] || exit 255\n'
        f'cd / && exec ip netns exec {second} sh -c "$3"\n'
    )  # fmt: skip
    ssh.chmod(0o755)
    try:
        for name in (first, second):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", f"{first}v", "netns", first, "type", "veth", "peer", "name", f"{second}v", "netns", second)
        for name, address in ((first, addresses[0]), (second, addresses[1])):
            ip("-n", name, "address", "add", f"{address}/24", "dev", f"{name}v")
            ip("-n", name, "link", "set", f"{name}v", "up")
        yield TwoHosts(first, addresses, programs)
    finally:
        for name in (first, second):
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            for pid in left.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.long
def test_the_example_trains_on_two_nodes_unchanged(hosts: TwoHosts, tmp_path: Path) -> None:
    """Done-when 6 under `--nodes`: one group of two processes, metrics in the run folder, the lines of torchrun."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    run = ScriptRun(tmp_path, "own-script")
    process = hosts.start(run, "resources.device=cpu")
    _, stderr = process.communicate(timeout=2 * DEADLINE_S)
    assert process.returncode == 0, stderr
    assert "check ok: processes: 2 started and joined" in stderr
    assert [record["step"] for record in run.records()] == list(range(1, 61))
    printed = [line.partition(": ")[2] for line in stderr.splitlines() if ": torchrun --nnodes=2" in line]
    assert ["--node-rank=0" in line for line in printed] == [True, False]
    assert all(shlex.split(line)[-1].endswith("logs/attempt_1/script.json") for line in printed)


@pytest.mark.long
def test_a_stop_reaches_the_ranks_behind_ssh(hosts: TwoHosts, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    run = ScriptRun(tmp_path)
    run.write_job([*LOOP_COMMAND, "--wait-at", "6"], launcher="torchrun")
    process = hosts.start(run)
    ended = run.folder / "logs" / "attempt_1" / "rank_1.started.json"
    wait_until(lambda: ended.exists() and any(record["step"] == 6 for record in run.records()), process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.STOPPED, stderr
    for rank in range(2):
        assert run.note(1, rank, "ended")["exit_code"] == 0, "each rank ended by itself"
    assert (run.folder / "output" / "checkpoint-6").is_dir()


def test_a_dry_run_connects_to_nobody(tmp_path: Path) -> None:
    """S4-49: `--dry-run` writes the files and prints the command of each node."""
    (tmp_path / "loop.py").write_text(LOOP)
    run = ScriptRun(tmp_path)
    run.write_job(LOOP_COMMAND, launcher="torchrun")
    code, stdout, stderr = run.train("--nodes", "127.0.0.1,node-2", "--dry-run")
    assert code == 0, stderr
    here, there = (shlex.split(line) for line in stdout.splitlines())
    assert here[1:3] == ["-m", "trainwright.launch.node"]
    assert there[0] == "ssh" and there[there.index("--") + 1] == "node-2"
    assert not (run.folder / "logs" / "attempt_1").exists(), "no attempt was begun"


BAD_NODES = [
    "a",
    "a,a",
    "a,-oProxyCommand=touch x",
    "a,b;c",
    "a,$(touch x)",
    "a,b c",
    "a,",
    "a,b\n",
    "a,`x`",
    "a,--",
    "a,é",
    "a,u@-b",
]


@pytest.mark.parametrize("text", BAD_NODES)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        hosts_of(text)


def test_the_remote_command_is_one_word_of_fixed_text_and_a_path(tmp_path: Path) -> None:
    file = tmp_path / "a b'; touch canary; $(touch canary)" / "nodes.json"
    command = ssh_command("me@node-2", file, 1)
    assert command[command.index("--") + 1] == "me@node-2"
    assert command[-1].isprintable()
    assert shlex.split(command[-1]) == [sys.executable, "-m", "trainwright.launch.node", str(file), "--node-rank=1"]
    assert hosts_of("node-1,me@node-2,10.0.0.3,fe80::1") == ("node-1", "me@node-2", "10.0.0.3", "fe80::1")

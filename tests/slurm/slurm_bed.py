"""A throw-away Slurm cluster on one machine: a temporary directory, free ports, a munge key and GPUs of its own.

    with SlurmBed([Node("a100-1", {"a100": 4})]) as bed:
        bed.run("sinfo")

Nothing outside its directory is touched. The programs are the distribution's (22.05 and 24.11 are known to work); it
runs as any user, with a network of each node's own (`namespaces=True`) as root only.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "sinfo", "squeue", "srun", "scancel")
INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
DEADLINE_S = 120.0
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE")

ONE_PARTITION = "PartitionName=gpu Nodes=ALL Default=YES MaxTime=1-00:00:00 DefaultTime=00:10:00 State=UP"

# What the stand-in for NVML shows of a GPU of each type; the key is the type in gres.conf.
NVML_LINES = {
    "a100": "gpu NVIDIA_A100-SXM4-80GB cc=8.0 mem=81920 used=300",
    "v100": "gpu Tesla_V100-SXM2-32GB cc=7.0 mem=32768 used=5",
    "rtx3080": "gpu NVIDIA_GeForce_RTX_3080 cc=8.6 mem=10240 used=5",
}

_CONFIGURATION = """\
ClusterName=bed
SlurmctldHost={controller}
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.sock
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={root}/etc/task_prolog
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={root}/log/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,bf_resolution=1,batch_sched_delay=0,sched_min_interval=0,bf_continue
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=60
SlurmdTimeout={slurmd_timeout_s}
MessageTimeout=60
KillWait={kill_wait_s}
MinJobAge=3600
MailProg=/bin/true
GresTypes=gpu
"""


def missing_programs() -> list[str]:
    """Return the programs of Slurm that are not installed here."""
    return [program for program in PROGRAMS if not shutil.which(program, path=_search_path())]


@dataclass(frozen=True)
class Node:
    """A node; `gpus` maps types to counts, in the order of their device files."""

    name: str
    gpus: Mapping[str, int]
    cpus: int = 8
    memory_mib: int = 8000
    features: Sequence[str] = ()


class SlurmBed:
    """A running cluster, from `with` to its end; `root` is its directory, `env` what every program here needs.

    `partitions` and `extra` are lines of slurm.conf. With `nvml` (the folder of the stand-in library) each node's jobs
    see that node's GPUs through NVML. With `namespaces` each node has an address and a hostname of its own.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        partitions: str = ONE_PARTITION,
        extra: str = "",
        *,
        namespaces: bool = False,
        nvml: Path | None = None,
        kill_wait_s: int = 5,
        slurmd_timeout_s: int = 60,
    ) -> None:
        self.nodes = tuple(nodes)
        self.partitions = partitions
        self.extra = extra
        self.namespaces = namespaces
        self.nvml = nvml
        self.kill_wait_s = kill_wait_s
        self.slurmd_timeout_s = slurmd_timeout_s
        # Unix sockets end at 108 characters: pytest's tmp_path is too long.
        self.root = Path(tempfile.mkdtemp(prefix="sb-", dir="/tmp"))
        self.root.chmod(0o755)
        self.env = _environment(self.root)
        self._ports = _free_ports(1 + len(self.nodes))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        # Names of links are at most 15 characters; two beds of one machine differ in process or in port.
        self._tag = f"sb{self._ports[0]}"
        self._network = f"10.{200 + self._ports[0] % 50}.{self._ports[0] // 50 % 250}"

    # -- configuration

    def _write(self) -> None:
        for folder in ("etc", "state", "run", "log", "dev", *(f"spool/{node.name}" for node in self.nodes)):
            (self.root / folder).mkdir(parents=True)
        for index in range(max(sum(node.gpus.values()) for node in self.nodes)):
            # It must look like a character device, or jobs get no CUDA_VISIBLE_DEVICES.
            (self.root / f"dev/nvidia{index}").symlink_to("/dev/null")
        key = self.root / "etc/munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(256))
        general = _CONFIGURATION.format(
            controller=f"{_hostname()}({self._network}.1)" if self.namespaces else "localhost(127.0.0.1)",
            port=self._ports[0],
            user=pwd.getpwuid(os.getuid()).pw_name,
            root=self.root,
            kill_wait_s=self.kill_wait_s,
            slurmd_timeout_s=self.slurmd_timeout_s,
        )
        lines = [self._node_line(node, port) for node, port in zip(self.nodes, self._ports[1:], strict=True)]
        text = "\n".join([general, *lines, self.partitions, self.extra, ""])
        (self.root / "etc/slurm.conf").write_text(text)
        (self.root / "etc/gres.conf").write_text("\n".join(["AutoDetect=off", *self._gres_lines(), ""]))
        self._write_task_prolog()

    def _node_line(self, node: Node, port: int) -> str:
        where = (
            f"NodeHostname={node.name} NodeAddr={self._address(node)}"
            if self.namespaces
            else f"NodeHostname={_hostname()} NodeAddr=127.0.0.1"
        )
        gres = ",".join(f"gpu:{kind}:{count}" for kind, count in node.gpus.items())
        features = f" Feature={','.join(node.features)}" if node.features else ""
        return (
            f"NodeName={node.name} {where} Port={port} CPUs={node.cpus} RealMemory={node.memory_mib} "
            f"Gres={gres}{features}"
        )

    def _gres_lines(self) -> Iterator[str]:
        for node in self.nodes:
            first = 0
            for kind, count in node.gpus.items():
                numbers = f"[{first}-{first + count - 1}]" if count > 1 else str(first)
                yield f"NodeName={node.name} Name=gpu Type={kind} File={self.root}/dev/nvidia{numbers}"
                first += count

    def _write_task_prolog(self) -> None:
        """What it prints is exported to every task: the node's own GPUs, as NVML there would show them."""
        lines = ["#!/bin/sh"]
        if self.nvml is not None:
            lines.append(f'echo "export STANDIN_NVML={self.root}/etc/gpus_$SLURMD_NODENAME.txt"')
            lines.append(f'echo "export LD_LIBRARY_PATH={self.nvml}"')
            for node in self.nodes:
                shown = [NVML_LINES[kind] for kind, count in node.gpus.items() for _ in range(count)]
                (self.root / f"etc/gpus_{node.name}.txt").write_text("\n".join([*shown, ""]))
        prolog = self.root / "etc/task_prolog"
        prolog.write_text("\n".join([*lines, ""]))
        prolog.chmod(0o755)

    # -- a network, a hostname and an /etc/hosts for each node (root only)

    def _address(self, node: Node) -> str:
        return f"{self._network}.{10 + self.nodes.index(node)}"

    def _network_up(self) -> None:
        tag, bridge = self._tag, f"{self._tag}b"
        hosts = [("127.0.0.1", "localhost"), (f"{self._network}.1", _hostname())]
        hosts += [(self._address(node), node.name) for node in self.nodes]
        (self.root / "etc/hosts").write_text("".join(f"{address} {name}\n" for address, name in hosts))
        commands = [
            f"ip link add {bridge} type bridge",
            f"ip addr add {self._network}.1/24 dev {bridge}",
            f"ip link set {bridge} up",
        ]
        for index, node in enumerate(self.nodes):
            commands += [
                f"ip netns add {tag}{index}",
                f"ip link add {tag}v{index} type veth peer name eth0 netns {tag}{index}",
                f"ip link set {tag}v{index} master {bridge} up",
                f"ip -n {tag}{index} addr add {self._address(node)}/24 dev eth0",
                f"ip -n {tag}{index} link set lo up",
                f"ip -n {tag}{index} link set eth0 up",
            ]
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True, timeout=DEADLINE_S)

    def _network_down(self) -> None:
        for index in range(len(self.nodes)):
            subprocess.run(["ip", "netns", "del", f"{self._tag}{index}"], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", f"{self._tag}v{index}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{self._tag}b"], capture_output=True, check=False)

    # -- daemons, in the foreground, so that exactly these are stopped

    def __enter__(self) -> SlurmBed:
        self._write()
        try:
            if self.namespaces:
                self._network_up()
            self._start_munged()
            self._start("slurmctld", ["slurmctld", "-D", "-i", "-c"])
            # A slurmd that comes first waits a second before it tries again.
            self.wait(self._controller_listens, "slurmctld")
            for node in self.nodes:
                self.start_slurmd(node.name)
            self.wait(lambda: self.states() == {node.name: "idle" for node in self.nodes}, "idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError, TimeoutError, subprocess.TimeoutExpired):
            self.clear(deadline_s=15)
        for name in sorted(self._daemons, key=lambda name: ("slurmd." not in name, name == "munged")):
            self.stop(name)
        self._reap()
        if self.namespaces:
            self._network_down()
        shutil.rmtree(self.root, ignore_errors=True)

    def _start_munged(self) -> None:
        files = {"key-file": "etc/munge.key", "socket": "run/munge.sock", "pid-file": "run/munged.pid"}
        files |= {"log-file": "log/munged.log", "seed-file": "run/munge.seed"}
        options = [f"--{option}={self.root}/{file}" for option, file in files.items()]
        self._start("munged", ["munged", "--foreground", "--force", *options])
        self.wait((self.root / "run/munge.sock").exists, "the socket of munge")

    def _controller_listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self._host, self._ports[0]), 0.3):
            return True
        return False

    @property
    def _host(self) -> str:
        return f"{self._network}.1" if self.namespaces else "127.0.0.1"

    def start_controller(self) -> None:
        """Start the controller again after `stop("slurmctld")`, with the jobs that it knew."""
        self._start("slurmctld", ["slurmctld", "-D", "-i"])

    def start_slurmd(self, name: str) -> None:
        """Start the daemon of a node, as after `stop(f"slurmd.{name}")`."""
        command = ["slurmd", "-D", "-N", name]
        if self.namespaces:
            index = [node.name for node in self.nodes].index(name)
            inside = 'mount --bind "$1" /etc/hosts && hostname "$2" && exec slurmd -D -N "$2"'
            command = ["nsenter", f"--net=/run/netns/{self._tag}{index}", "unshare", "--uts", "--mount"]
            command += ["sh", "-c", inside, "sh", str(self.root / "etc/hosts"), name]
        self._start(f"slurmd.{name}", command)

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End a daemon: munged, slurmctld or slurmd.NODE."""
        daemon = self._daemons.pop(name)
        daemon.send_signal(how)
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _start(self, name: str, command: Sequence[str]) -> None:
        # The daemons end with the tests, also where these are killed.
        with_us = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
        with (self.root / f"log/{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [*with_us, *command],
                env=self.env,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _reap(self) -> None:
        """End what jobs left behind: whatever has this cluster in its environment."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, how)
            time.sleep(0.1)

    def processes(self) -> list[int]:
        """Return the ids of all processes of this cluster, its jobs' included."""
        mark, found = f"SLURM_CONF={self.root}/etc/slurm.conf".encode(), []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                ours = folder.name.isdigit() and int(folder.name) != os.getpid()
                if ours and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    # -- use

    def run(
        self, *command: str, check: bool = True, cwd: Path | None = None, timeout_s: float = DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this cluster.

        Raises:
            RuntimeError: it failed, and `check`.
        """
        done = subprocess.run(
            command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def trainwright(
        self, *arguments: str, cwd: Path | None = None, timeout_s: float = DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run `trainwright ARGUMENTS` as on the login node; what it exits with is the caller's to look at."""
        command = (sys.executable, "-m", "trainwright", *arguments)
        return self.run(*command, check=False, cwd=cwd, timeout_s=timeout_s)

    def sbatch(self, script: str, *options: str, name: str = "job") -> str:
        """Submit a script and return the job id; it runs in `root`."""
        file = self.root / f"{name}.sbatch"
        file.write_text(script)
        return self.run("sbatch", "--parsable", *options, str(file), cwd=self.root).stdout.strip().split(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """Return what `scontrol show job` says of a job, also for a while after its end."""
        words = self.run("scontrol", "-o", "show", "job", job_id).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_job(self, job_id: str, states: Sequence[str] = ENDED, *, deadline_s: float = DEADLINE_S) -> dict[str, str]:
        """Wait until a job is in one of the states, and return what is known of it."""
        self.wait(lambda: self.job(job_id)["JobState"] in states, f"job {job_id} in {states}", deadline_s=deadline_s)
        return self.job(job_id)

    def states(self) -> dict[str, str]:
        """Return the state of each node, lower case."""
        lines = self.run("sinfo", "-N", "-h", "-o", "%N %T", check=False).stdout.splitlines()
        return dict(line.split() for line in lines if line)

    def clear(self, *, deadline_s: float = DEADLINE_S) -> None:
        """Cancel all jobs, wait for them to be gone, and bring back the nodes that were taken down."""
        own = ("-u", str(os.getuid()))
        self.run("scancel", "--signal=KILL", "--full", *own, check=False)
        self.run("scancel", *own, check=False)
        self.wait(lambda: not self.run("squeue", "-h").stdout.strip(), "an empty queue", deadline_s=deadline_s)
        for node, state in self.states().items():
            if state.startswith(("down", "drain")):
                self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)

    def wait(self, condition: Callable[[], object], what: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Wait for a condition.

        Raises:
            TimeoutError: it did not come about in time.
            RuntimeError: a daemon ended meanwhile.
        """
        end = time.monotonic() + deadline_s
        while not condition():
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    raise RuntimeError(f"{name} ended: {(self.root / f'log/{name}.out').read_text()[-2000:]}")
            if time.monotonic() > end:
                raise TimeoutError(f"not within {deadline_s:.0f} s: {what}\n{self._last_words()}")
            time.sleep(0.05)

    def _last_words(self) -> str:
        log = self.root / "log/slurmctld.log"
        return log.read_text()[-3000:] if log.exists() else ""


def _environment(root: Path) -> dict[str, str]:
    """The caller's, without what an allocation or a user's defaults (SBATCH_PARTITION) put there."""
    prefixes = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SINFO_", "SQUEUE_", "SCANCEL_", "CUDA_VISIBLE")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    return kept | {"SLURM_CONF": f"{root}/etc/slurm.conf", "PATH": _search_path()}


def _search_path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _hostname() -> str:
    return socket.gethostname().split(".")[0]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]

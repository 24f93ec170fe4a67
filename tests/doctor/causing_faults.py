"""Causes real failures on this machine and keeps what they left as labelled cases of `tests/data/failures/real`.

    python tests/doctor/causing_faults.py [NAME...]

Run by hand, as root (small disks, control groups, killed processes); the cases are data from then on. Paths, hosts and
the environment are replaced in what is kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from faulty_programs import PROGRAMS

REAL = Path(__file__).resolve().parents[1] / "data" / "failures" / "real"
LONGEST_LOG_BYTES = 14_000
DEADLINE_S = 240


@dataclass
class Fault:
    """One failure: the program that fails, how it is started, and what a diagnosis of it has to say."""

    name: str
    cause: list[str]
    fix: list[str]
    how: str
    program: str = ""
    """Key of PROGRAMS; the fault's name where left out."""
    ranks: int = 0
    """Started by torchrun with so many ranks; 0: python alone."""
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    command: list[str] | None = None
    """In place of python: `{program}` stands for its path, `{dir}` for a scratch folder."""
    around: Callable[[Path], contextlib.AbstractContextManager[dict[str, str]]] | None = None
    """What has to be there while it runs; gives environment variables."""
    while_running: Callable[[subprocess.Popen[bytes], Path], None] | None = None
    kernel_log: bool = False
    """Also keep the lines that the kernel logged meanwhile."""
    keep: list[str] = field(default_factory=list)
    """Files of the scratch folder to keep too."""
    rank: int | None = None
    """The rank that has to be named."""


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "256k", options: str = "") -> Iterator[dict[str, str]]:
    """A tmpfs of that size at `<folder>/disk`."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "tmpfs", str(disk)], check=True)
    try:
        yield {"DISK": str(disk)}
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@contextlib.contextmanager
def read_only_disk(folder: Path) -> Iterator[dict[str, str]]:
    with small_disk(folder, "1m", ",ro") as environment:
        yield environment


@contextlib.contextmanager
def disk_of_2_mb(folder: Path) -> Iterator[dict[str, str]]:
    with small_disk(folder, "2m") as environment:
        yield environment


@contextlib.contextmanager
def little_memory(folder: Path) -> Iterator[dict[str, str]]:
    """A control group of 700 MB without swap, which the program joins by itself (v1, as on this machine)."""
    group = Path("/sys/fs/cgroup/memory") / f"doctor-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(700 * 2**20))
    try:
        yield {"GROUP": str(group / "cgroup.procs")}
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


@contextlib.contextmanager
def port_in_use(folder: Path) -> Iterator[dict[str, str]]:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 29511))
        holder.listen()
        yield {}


def kill_child_named(text: str, number: int) -> Callable[[subprocess.Popen[bytes], Path], None]:
    """Wait for the program's word `ready`, then send the signal to the process whose pid it wrote to `text`."""

    def act(process: subprocess.Popen[bytes], folder: Path) -> None:
        deadline = time.monotonic() + 120
        while not (folder / text).exists() or not (folder / text).read_text().strip():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        time.sleep(1)
        os.kill(int((folder / text).read_text()), number)

    return act


def start_of(fault: Fault, folder: Path) -> list[str]:
    program = folder / "train.py"
    program.write_text(PROGRAMS[fault.program or fault.name])
    if fault.command is not None:
        return [part.format(program=program, dir=folder) for part in fault.command]
    if fault.ranks:
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={fault.ranks}"]
        standalone = [] if any("master-port" in part for part in fault.arguments) else ["--standalone"]
        return [sys.executable, *torchrun, *standalone, *fault.arguments, str(program)]
    return [sys.executable, str(program), *fault.arguments]


def cause(fault: Fault) -> None:
    """Make the failure happen, and write its case."""
    with tempfile.TemporaryDirectory(prefix="fault-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        environment = {
            **{key: value for key, value in os.environ.items() if key in ("PATH", "LANG")},
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "SCRATCH": str(folder),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        } | fault.environment
        if fault.around is not None:
            environment |= stack.enter_context(fault.around(folder))
        before = kernel_log()
        log = folder / "run.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                start_of(fault, folder),
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
            try:
                if fault.while_running is not None:
                    fault.while_running(process, folder)
                code = process.wait(DEADLINE_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        case = REAL / fault.name
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir(parents=True)
        said = log.read_text(errors="replace")
        (case / "run.log").write_text(trimmed(neutral(said, folder)))
        if fault.kernel_log:
            new = [line for line in kernel_log() if line not in set(before)]
            wanted = [line for line in new if re.search(r"oom|Out of memory|Killed process|segfault", line, re.I)]
            (case / "dmesg.txt").write_text(neutral("\n".join(wanted) + "\n", folder))
        for pattern in fault.keep:
            for path in sorted(folder.glob(pattern)):
                text = neutral(path.read_text(errors="replace"), folder)
                (case / path.name).write_text(text if path.suffix == ".json" else trimmed(text))
        write_case(case, fault)
        print(f"{fault.name}: exit status {code}, {len(said):,} characters", flush=True)


def write_case(case: Path, fault: Fault) -> None:
    about: dict[str, object] = {"cause": fault.cause, "fix": fault.fix, "source": f"caused: {fault.how}"}
    if fault.rank is not None:
        about["rank"] = fault.rank
    (case / "case.yaml").write_text(yaml.safe_dump(about, sort_keys=False, width=110))


def kernel_log() -> list[str]:
    return subprocess.run(["dmesg"], capture_output=True, text=True).stdout.splitlines()


def neutral(text: str, folder: Path) -> str:
    """Replace what is of this machine: scratch folders, the environment's place, the host's name."""
    environment = Path(sys.executable).parents[1]
    for found, instead in (
        (str(folder), "/home/user/project"),
        (str(environment), "/opt/env"),
        (str(environment.resolve()), "/opt/env"),
        (str(Path(__file__).resolve().parents[2]), "/opt/trainwright"),
        (str(Path(sys.executable).resolve().parents[1]), "/usr"),
        (socket.gethostname(), "node1"),
    ):
        text = re.sub(rf"(?<![\w-]){re.escape(found)}(?![\w-])", instead, text)
    return text


def trimmed(text: str) -> str:
    if len(text) <= LONGEST_LOG_BYTES:
        return text
    head, tail = text[: LONGEST_LOG_BYTES // 3], text[-2 * LONGEST_LOG_BYTES // 3 :]
    head, tail = head[: head.rfind("\n") + 1], tail[tail.find("\n") + 1 :]
    return f"{head}[... left out ...]\n{tail}"


FAULTS = [
    Fault(
        "no-torch",
        ["missing-module"],
        ["pip install torch"],
        "python without site-packages imports torch",
        command=[sys.executable, "-S", "{program}"],
    ),
    Fault(
        "no-flash-attn", ["missing-module"], ["flash"], "a model asked for flash_attention_2, which is not installed"
    ),
    Fault("no-bitsandbytes-like", ["missing-module"], ["pip install"], "an import of a package that is not there"),
    Fault("torch-without-cuda", ["cuda-not-available"], ["torch"], ".cuda() on a CPU build of torch"),
    Fault(
        "bf16-without-gpu",
        ["bf16-unsupported", "cuda-not-available"],
        ["fp16|precision|use_cpu"],
        "TrainingArguments(bf16=True) without a GPU",
    ),
    Fault("too-many-open-files", ["open-files-limit"], ["ulimit -n"], "RLIMIT_NOFILE of 40"),
    Fault("no-more-threads", ["process-limit"], ["ulimit -u"], "RLIMIT_NPROC as an ordinary user"),
    Fault("file-size-limit", ["disk-full"], ["quota|ulimit -f|space"], "RLIMIT_FSIZE while torch.save writes"),
    Fault("disk-full-torch-save", ["disk-full"], ["df "], "torch.save on a full tmpfs", around=small_disk),
    Fault("disk-full-safetensors", ["disk-full"], ["df "], "safetensors save_file on a full tmpfs", around=small_disk),
    Fault("disk-full-plain-write", ["disk-full"], ["df "], "a write to a full tmpfs", around=small_disk),
    Fault("disk-full-trainer", ["disk-full"], ["df "], "Trainer's checkpoint on a small tmpfs", around=disk_of_2_mb),
    Fault(
        "read-only-disk",
        ["output-not-writable"],
        ["output"],
        "an output folder on a read-only mount",
        around=read_only_disk,
    ),
    Fault("no-permission", ["output-not-writable"], ["output"], "an output folder of another user"),
    Fault(
        "truncated-safetensors",
        ["truncated-checkpoint"],
        ["checkpoint|download|copy"],
        "a safetensors file cut in half",
    ),
    Fault("empty-safetensors", ["truncated-checkpoint"], ["checkpoint|download|copy"], "an empty safetensors file"),
    Fault("truncated-pt", ["truncated-checkpoint"], ["checkpoint|download|copy"], "a .pt file cut in half"),
    Fault("empty-optimizer-pt", ["truncated-checkpoint"], ["checkpoint"], "resume with an empty optimizer.pt"),
    Fault(
        "half-checkpoint",
        ["truncated-checkpoint"],
        ["checkpoint"],
        "resume from a checkpoint without trainer_state.json",
    ),
    Fault("other-shapes", ["checkpoint-mismatch"], ["config|model"], "load_state_dict of a wider model"),
    Fault(
        "small-shm",
        ["shm-full"],
        ["num_workers=0|num_workers|shm"],
        "DataLoader workers with a /dev/shm of 4 MB",
        command=[
            "unshare",
            "-m",
            "sh",
            "-c",
            "mount -t tmpfs -o size=4m tmpfs /dev/shm && exec " + sys.executable + " {program}",
        ],
    ),
    Fault(
        "small-shm-large-tensor",
        ["shm-full"],
        ["num_workers|shm"],
        "one large tensor from a worker, /dev/shm of 4 MB",
        command=[
            "unshare",
            "-m",
            "sh",
            "-c",
            "mount -t tmpfs -o size=4m tmpfs /dev/shm && exec " + sys.executable + " {program}",
        ],
    ),
    Fault(
        "worker-killed",
        ["killed-from-outside"],
        ["dmesg"],
        "SIGKILL of a DataLoader worker by hand",
        program="stuck-worker-with-pid",
        while_running=kill_child_named("worker.pid", signal.SIGKILL),
    ),
    Fault(
        "worker-segfault", ["segfault"], ["num_workers=0|faulthandler"], "a null pointer read in a DataLoader worker"
    ),
    Fault(
        "worker-raises",
        ["data-error", "exception"],
        ["__getitem__|data"],
        "a row without the column that __getitem__ reads",
    ),
    Fault(
        "worker-stuck",
        ["data-loader-stuck"],
        ["__getitem__|num_workers"],
        "a worker that sleeps, DataLoader(timeout=4)",
    ),
    Fault("segfault-with-handler", ["segfault"], ["faulthandler|stack|gdb"], "a null pointer read, faulthandler on"),
    Fault(
        "segfault-in-shell",
        ["segfault"],
        ["faulthandler"],
        "a null pointer read under bash",
        program="segfault",
        command=["bash", "-c", sys.executable + " {program}; echo exit status $?"],
    ),
    Fault(
        "abort-in-shell",
        ["abort", "undetermined"],
        ["faulthandler"],
        "os.abort() under bash",
        command=["bash", "-c", sys.executable + " {program}; echo exit status $?"],
    ),
    Fault("host-allocation", ["host-oom"], ["memory|batch"], "torch.empty beyond RLIMIT_AS"),
    Fault("python-memory-error", ["host-oom"], ["memory|batch"], "a list beyond RLIMIT_AS"),
    Fault("numpy-memory-error", ["host-oom"], ["memory|batch"], "np.ones beyond RLIMIT_AS"),
    Fault(
        "host-oom-main",
        ["host-oom"],
        ["--mem|memory"],
        "the main process beyond its control group's memory",
        around=little_memory,
        kernel_log=True,
        command=["bash", "-c", sys.executable + " {program}; echo exit status $?"],
    ),
    Fault(
        "host-oom-worker",
        ["host-oom/worker"],
        ["num_workers|prefetch"],
        "a DataLoader worker beyond the control group's memory",
        around=little_memory,
        kernel_log=True,
    ),
    Fault(
        "killed-by-hand",
        ["killed-from-outside"],
        ["dmesg"],
        "kill -9 of a program under bash, no memory pressure",
        command=["bash", "-c", sys.executable + " {program}; echo exit status $?"],
        kernel_log=True,
        while_running=kill_child_named("main.pid", signal.SIGKILL),
    ),
    Fault(
        "terminated-by-hand",
        ["terminated"],
        ["requeue|signal|resum"],
        "SIGTERM of a program under bash",
        program="killed-by-hand",
        command=["bash", "-c", sys.executable + " {program}; echo exit status $?"],
        while_running=kill_child_named("main.pid", signal.SIGTERM),
    ),
    Fault(
        "interrupted",
        ["interrupted"],
        ["resum|same command"],
        "SIGINT",
        program="killed-by-hand",
        while_running=kill_child_named("main.pid", signal.SIGINT),
    ),
    Fault("rank-killed", ["killed-from-outside"], ["dmesg"], "SIGKILL of rank 1 of two, torchrun", ranks=2, rank=1),
    Fault("rank-raises", ["exception"], ["train.py"], "ZeroDivisionError in rank 1 of two, torchrun", ranks=2, rank=1),
    Fault("rank-exits", ["exited"], ["exit"], "os._exit(3) in rank 1 of two, torchrun", ranks=2, rank=1),
    Fault(
        "rank-segfaults",
        ["segfault"],
        ["faulthandler"],
        "a null pointer read in rank 1 of two, torchrun",
        ranks=2,
        rank=1,
    ),
    Fault(
        "rank-aborts-at-exit",
        ["abort/at-exit"],
        ["destroy_process_group", r"os\._exit\(0\)"],
        "a collective that rank 1 of two does not wait for at its end, torchrun, Python 3.11",
        ranks=2,
        rank=1,
    ),
    Fault(
        "rank-out-of-host-memory",
        ["host-oom"],
        ["memory|batch"],
        "rank 1 of two beyond RLIMIT_AS, torchrun",
        ranks=2,
        rank=1,
    ),
    Fault(
        "rank-sleeps",
        ["rank-missing", "hang"],
        ["rank 1"],
        "rank 1 sleeps before a collective of 8 s time-out; both stacks and flight recorders dumped",
        ranks=2,
        rank=1,
        keep=["fr_*.json", "stack_*.txt"],
    ),
    Fault(
        "rank-sleeps-no-dump",
        ["rank-missing", "hang", "undetermined"],
        ["py-spy|TORCH_FR|stack"],
        "rank 1 sleeps before a collective of 8 s time-out; nothing dumped",
        program="rank-sleeps",
        ranks=2,
        environment={"NO_DUMP": "1"},
    ),
    Fault(
        "rank-stopped",
        ["rank-missing", "hang", "undetermined", "killed-from-outside"],
        ["py-spy|TORCH_FR|stack|SIGSTOP|dmesg"],
        "SIGSTOP of rank 1 of two",
        ranks=2,
        command=[
            "timeout",
            "-s",
            "KILL",
            "40",
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "{program}",
        ],
    ),
    Fault(
        "other-collective",
        ["collective-mismatch"],
        ["TORCH_DISTRIBUTED_DEBUG|same order|rank"],
        "broadcast against all_reduce, DETAIL",
        ranks=2,
        environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ),
    Fault(
        "other-shape",
        ["collective-mismatch"],
        ["TORCH_DISTRIBUTED_DEBUG|shape|rank"],
        "all_reduce of 4 against 8 elements, DETAIL",
        ranks=2,
        environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ),
    Fault(
        "monitored-barrier", ["rank-missing"], ["rank 1"], "rank 1 never comes to monitored_barrier", ranks=2, rank=1
    ),
    Fault(
        "uneven-batches",
        ["uneven-data", "rank-missing"],
        ["drop_last|DistributedSampler|join|even"],
        "rank 1 has fewer batches than rank 0 under DDP",
        ranks=2,
        keep=["fr_*.json"],
        rank=1,
    ),
    Fault(
        "port-in-use",
        ["port-in-use"],
        ["--master-port|master_port|--standalone"],
        "torchrun --master-port on a bound port",
        program="rank-raises",
        ranks=2,
        arguments=["--master-addr=127.0.0.1", "--master-port=29511"],
        around=port_in_use,
    ),
    Fault(
        "no-master",
        ["master-unreachable"],
        ["MASTER_ADDR|master"],
        "rank 1 alone; nothing listens at MASTER_ADDR",
        environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871", "RANK": "1", "WORLD_SIZE": "2"},
    ),
    Fault(
        "other-rank-never-comes",
        ["rank-missing", "master-unreachable"],
        ["nnodes|node|rank"],
        "rank 0 of two alone waits at init",
        program="no-master",
        environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29873", "RANK": "0", "WORLD_SIZE": "2"},
    ),
    Fault("not-under-torchrun", ["not-launched"], ["torchrun"], "init_process_group() without a launcher"),
    Fault(
        "unused-parameters",
        ["unused-parameters"],
        ["find_unused_parameters"],
        "DDP with a branch that gets no gradient",
        ranks=2,
    ),
    Fault(
        "models-differ", ["ranks-differ", "collective-mismatch"], ["rank"], "DDP around models of two widths", ranks=2
    ),
    Fault("loss-nan", ["loss-nan"], ["learning_rate"], "Trainer at a learning rate of 1e20"),
    Fault("loss-diverges", ["loss-divergence"], ["learning_rate"], "Trainer at a learning rate of 3 with SGD"),
    Fault(
        "loss-oscillates",
        ["loss-oscillation", "loss-divergence"],
        ["learning_rate|warmup"],
        "Trainer with two kinds of batches and a high learning rate",
    ),
    Fault(
        "nothing-to-train",
        ["no-trainable-parameters"],
        ["requires_grad|train()|modules"],
        "Trainer on a model whose parameters are all frozen",
    ),
    Fault("loss-zero", ["loss-zero"], ["label"], "Trainer on labels that are all -100"),
    Fault("no-pad-token", ["no-pad-token"], ["pad_token"], "padding=True with a tokenizer that has no pad token"),
    Fault(
        "token-out-of-range",
        ["index-out-of-range"],
        ["resize_token_embeddings|vocab"],
        "a token id beyond the embedding",
    ),
    Fault("target-out-of-range", ["index-out-of-range"], ["label|num_labels"], "class 9 of 3 in cross_entropy"),
    Fault(
        "hub-offline",
        ["hub-unreachable"],
        ["download|local"],
        "from_pretrained with HF_HUB_OFFLINE=1 and an empty cache",
    ),
    Fault(
        "hub-refuses",
        ["hub-unreachable"],
        ["download|proxy|local|HF_ENDPOINT"],
        "from_pretrained with an endpoint that refuses",
        environment={"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"},
    ),
    Fault(
        "model-path-wrong",
        ["model-not-found", "hub-unreachable"],
        ["path|name|folder"],
        "from_pretrained of a folder that is not there",
    ),
    Fault("bad-jsonl", ["data-error"], ["row|line|mend"], "load_dataset of JSON Lines with a broken row"),
    Fault("missing-column", ["data-error", "exception"], ["column|train.py"], "map() reads a column that is not there"),
    Fault(
        "ragged-labels", ["ragged-batch"], ["padding|collator"], "the default collator with labels of different lengths"
    ),
    Fault("data-not-found", ["data-not-found"], ["data|path"], "load_dataset of a file that is not there"),
    Fault(
        "accelerate-child-fails",
        ["exception"],
        ["train.py"],
        "accelerate launch of a script that raises",
        command=[sys.executable, "-m", "accelerate.commands.launch", "--cpu", "{program}"],
    ),
    Fault("fp16-unscale", ["fp16-weights"], ["fp32|bf16"], "GradScaler on weights that are fp16 themselves"),
    Fault(
        "deepspeed-batch",
        ["batch-arithmetic"],
        ["train_batch_size|gradient_accumulation"],
        "a DeepSpeed config whose batch sizes contradict",
    ),
    Fault("lora-targets", ["lora-targets"], ["target_modules"], "LoRA on module names that the model does not have"),
    Fault("dtype-mismatch", ["dtype-mismatch"], ["dtype|autocast"], "bf16 input into an fp32 layer"),
    Fault("shape-mismatch", ["exception"], ["train.py|shape"], "a matrix product that does not fit"),
    Fault("bad-argument", ["usage"], ["--help"], "an unknown flag of the training script"),
    Fault("healthy-trainer", ["healthy"], [], "Trainer that ends well"),
    Fault("healthy-warnings", ["healthy"], [], "a run that ends well after warnings, retries and a caught error"),
]

if __name__ == "__main__":
    wanted = sys.argv[1:]
    for fault in FAULTS:
        if not wanted or fault.name in wanted:
            try:
                cause(fault)
            except (subprocess.SubprocessError, AssertionError, OSError) as error:
                print(f"{fault.name}: NOT CAUSED: {error!r}", flush=True)

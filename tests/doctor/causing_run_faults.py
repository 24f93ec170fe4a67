"""Causes real failures of `trainwright train` runs and of Slurm jobs, and keeps what they left as labelled cases.

    python tests/doctor/causing_run_faults.py [NAME...]

Run by hand, as root, with Slurm's programs installed; the cases are data from then on.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent / "benchmarks"), str(TESTS / "slurm"), str(TESTS / "train")]

from causing_faults import REAL, Fault, neutral, small_disk, trimmed, write_case  # noqa: E402
from live_run import TINY_GPT2, LiveRun  # noqa: E402
from slurm_bed import Node, SlurmBed  # noqa: E402

ROWS = [{"question": f"What is {a} plus {b}?", "answer": f"{a + b}."} for a in range(12) for b in range(8)]
KEPT = ("run.json", "plan.json", "resolved.json", "events.jsonl", "metrics.jsonl", "system.jsonl")


def job(folder: Path, rows: list[str] | None = None, **sections: Any) -> None:
    """Write data.jsonl and job.yaml of a tiny model on two CPU ranks."""
    lines = rows if rows is not None else [json.dumps(row) for row in ROWS]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    written: dict[str, Any] = {
        "name": "run",
        "output_dir": str(folder / "runs"),
        "model": {"from_scratch": TINY_GPT2, "tokenizer": {"vocab_size": 300}},
        "data": {"path": str(folder / "data.jsonl"), "max_length": 64, "cache_dir": str(folder / "cache")},
        "train": {"global_batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-3, "max_steps": 400},
        "checkpoint": {"every": "50 steps"},
        "resources": {"device": "cpu", "precision": "fp32", "ranks": 2, "strategy": "ddp"},
        "tracking": [],
    }
    for key, value in sections.items():
        written[key] = written[key] | value if isinstance(written.get(key), dict) else value
    (folder / "job.yaml").write_text(json.dumps(written))


def keep(folder: Path, run_dir: Path, fault: Fault) -> None:
    """Keep the texts of a run folder as a case."""
    case = REAL / fault.name
    shutil.rmtree(case, ignore_errors=True)
    (case / "run" / "logs").mkdir(parents=True)
    paths = [run_dir / name for name in KEPT]
    paths += [path for path in sorted(run_dir.glob("logs/**/*")) if path.is_file() and path.suffix in (".log", ".json")]
    for path in paths:
        if path.is_file() and path.parent.name != "latest":
            place = case / "run" / path.relative_to(run_dir)
            place.parent.mkdir(parents=True, exist_ok=True)
            text = neutral(path.read_text(errors="replace"), folder)
            place.write_text(text if path.suffix == ".json" else trimmed(text))
    write_case(case, fault)
    print(f"{fault.name}: kept", flush=True)


def run_of(
    fault: Fault, disturb: Callable[[LiveRun], object] = lambda run: None, *arguments: str, **sections: Any
) -> None:
    """Run a job to its bad end and keep it."""
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        folder = Path(name)
        environment = {"PYTHONPATH": str(TESTS / "train"), "XDG_DATA_HOME": name}
        if fault.name == "run-disk-full":
            with small_disk(folder, "2500k") as disk:
                job(folder, output_dir=f"{disk['DISK']}/runs", **sections)
                run_dir = Path(disk["DISK"]) / "runs" / "run"
                with LiveRun(folder, run_dir, arguments, environment=environment) as run:
                    run.wait_for_step(2)
                    (Path(disk["DISK"]) / "ballast").write_bytes(bytes(shutil.disk_usage(disk["DISK"]).free - 60_000))
                    run.end()
                keep(folder, run_dir, fault)
            return
        job(folder, **sections)
        run_dir = folder / "runs" / "run"
        with LiveRun(folder, run_dir, arguments, environment=environment) as run:
            disturb(run)
            run.end()
        keep(folder, run_dir, fault)


def kill_rank(number: int, rank: int) -> Callable[[LiveRun], object]:
    def disturb(run: LiveRun) -> None:
        run.wait_for_step(5)
        run.wait_for_ranks(2)[rank].send_signal(number)

    return disturb


def stop(run: LiveRun) -> None:
    run.wait_for_step(5)
    run.launcher.send_signal(signal.SIGTERM)


def faulty(kind: str, step: int, rank: int = 0) -> dict[str, Any]:
    return {"task": "faulty_task:Faulty", "task_options": {"fault": kind, "step": step, "rank": rank}}


def run_faults() -> dict[str, Callable[[], None]]:
    broken = [json.dumps(row) for row in ROWS]
    broken[31] = '{"question": "What is 3 plus'
    return {
        "run-rank-killed": lambda: run_of(
            Fault(
                "run-rank-killed", ["killed-from-outside"], ["trainwright train"], "SIGKILL of rank 1 of a run", rank=1
            ),
            kill_rank(signal.SIGKILL, 1),
            "--max-restarts=0",
        ),
        "run-rank-segfaults": lambda: run_of(
            Fault("run-rank-segfaults", ["segfault"], ["faulthandler"], "SIGSEGV of rank 0 of a run", rank=0),
            kill_rank(signal.SIGSEGV, 0),
            "--max-restarts=0",
        ),
        "run-task-raises": lambda: run_of(
            Fault(
                "run-task-raises", ["exception"], ["faulty_task.py"], "a task that raises in rank 1 at step 7", rank=1
            ),
            **faulty("raise", 7, 1),
        ),
        "run-loss-nan": lambda: run_of(
            Fault("run-loss-nan", ["loss-nan"], ["train.learning_rate"], "a task whose loss is NaN at step 7"),
            **faulty("nan", 7),
        ),
        "run-bad-row": lambda: run_of_rows(broken),
        "run-disk-full": lambda: run_of(
            Fault("run-disk-full", ["disk-full"], ["df "], "a disk that fills up before the first checkpoint"),
        ),
        "run-stopped": lambda: run_of(Fault("run-stopped", ["healthy"], [], "SIGTERM to the launcher: saved"), stop),
        "run-finished": lambda: run_of(
            Fault("run-finished", ["healthy"], [], "a run that ends well"), train={"max_steps": 30}
        ),
    }


def run_of_rows(rows: list[str]) -> None:
    fault = Fault("run-bad-row", ["data-error"], ["row|line"], "a row that is cut short")
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        folder = Path(name)
        job(folder, rows=rows)
        with LiveRun(folder, folder / "runs" / "run", [], environment={"XDG_DATA_HOME": name}) as run:
            run.end()
        keep(folder, folder / "runs" / "run", fault)


def slurm_faults() -> None:
    """Make jobs fail on a cluster of the bed's, all in one session."""
    partitions = "PartitionName=gpu Nodes=ALL Default=YES MaxTime=2 DefaultTime=00:01:00 State=UP"
    with SlurmBed([Node("n1", {"a100": 2}), Node("n2", {"a100": 2})], partitions, slurmd_timeout_s=10) as bed:
        work = 'for i in $(seq 200); do echo "step $i/200 loss 1.$i"; sleep 1; done'
        refused = bed.run("sbatch", "--gres=gpu:h100:1", "--wrap", "true", check=False)
        too_many = bed.run("sbatch", "--gres=gpu:a100:8", "--wrap", "true", check=False)
        too_long = bed.run("sbatch", "--partition=none", "--wrap", "true", check=False)
        limited = bed.sbatch(f"#!/bin/bash\n{work}\n", "--time=1", "--nodelist=n1", f"--output={bed.root}/limited.out")
        failing = bed.sbatch("#!/bin/bash\nexit 1\n", "--nodelist=n2")
        waiting = bed.sbatch("#!/bin/bash\ntrue\n", f"--dependency=afterok:{failing}")
        cancelled = bed.sbatch(
            f"#!/bin/bash\nsrun bash -c '{work}'\n", "--nodelist=n2", f"--output={bed.root}/cancelled.out"
        )
        bed.wait(
            lambda: (bed.root / "cancelled.out").exists() and "step 3" in (bed.root / "cancelled.out").read_text(),
            "steps",
        )
        bed.run("scancel", cancelled)
        bed.wait(lambda: "DependencyNeverSatisfied" in bed.run("squeue", check=False).stdout, "the dependency")
        queue = bed.run("squeue", check=False).stdout
        bed.wait_job(limited, deadline_s=200)
        time.sleep(2)
        texts = {
            "slurm-real-gres": (refused.stdout + refused.stderr, ["slurm/gres"], ["--gres"]),
            "slurm-real-too-many": (too_many.stdout + too_many.stderr, ["slurm/gres"], ["--gres"]),
            "slurm-real-partition": (too_long.stdout + too_long.stderr, ["slurm/refused"], ["partition"]),
            "slurm-real-dependency": (queue, ["slurm/dependency"], ["scontrol"]),
            "slurm-real-time-limit": ((bed.root / "limited.out").read_text(), ["slurm/time-limit"], ["--time"]),
            "slurm-real-cancelled": (
                (bed.root / "cancelled.out").read_text(),
                ["slurm/cancelled"],
                ["sacct|same command|go on"],
            ),
        }
        del waiting
        for name, (text, cause, fix) in texts.items():
            case = REAL / name
            shutil.rmtree(case, ignore_errors=True)
            case.mkdir(parents=True)
            (case / "slurm.out").write_text(trimmed(neutral(text, bed.root)))
            write_case(case, Fault(name, cause, fix, "on a cluster of tests/slurm/slurm_bed.py"))
            print(f"{name}: kept", flush=True)


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for name, act in {**run_faults(), "slurm": slurm_faults}.items():
        if not wanted or name in wanted:
            try:
                act()
            except (subprocess.SubprocessError, AssertionError, OSError) as error:
                print(f"{name}: NOT CAUSED: {error!r}", flush=True)

"""`trainwright tune` on real workers, whose device is a small one played on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from tuned_jobs import everything_in, write_job

from trainwright.job.loading import load_job
from trainwright.launch.planning import PlanFlags, plan_job
from trainwright.launch.processes import Processes
from trainwright.launch.supervision import StopAsked, start_here
from trainwright.plan.layout import Layout
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import read
from trainwright.tune.probes import ProbeWatch, WorkerProbes
from trainwright.tune.tuning import TuneOptions, tune

DEADLINE_S = 240.0
GIVES_UP_S = 600.0


def trainwright(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command in a folder, with a place of its own for what is temporary."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "trainwright", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_the_command_finds_the_edge_and_later_commands_use_what_it_measured(tmp_path: Path) -> None:
    """S2-17, S2-24 to S2-37, U-07, T-11: few probes cold, none warm; the run folder is as before, the job file is told.

    The job asks for 32, which is too much for its device.
    """
    write_job(tmp_path, task_options={"limit_mib": 6})
    (tmp_path / "outputs" / "run").mkdir(parents=True)
    (tmp_path / "outputs" / "run" / "mine.txt").write_text("stays")
    before = everything_in(tmp_path / "outputs")
    cold = trainwright(tmp_path, "tune", "job.yaml", "train.micro_batch_size=32", "--json")
    assert cold.returncode == 0, cold.stderr
    found = json.loads(cold.stdout)
    points = {point["micro_batch_size"]: point for point in found["points"]}
    assert found["probes"] <= 4
    assert all(point["needed_bytes"] <= point["capacity_bytes"] == 6 * 2**20 for point in points.values())
    assert found["levels"]["extreme"] == max(points) < 32
    assert "is too large: out of memory in training: CUDA out of memory" in cold.stderr
    assert found["too_large"] > max(points)
    assert found["fastest"] in points
    assert found["evaluated"] >= max(points)
    assert everything_in(tmp_path / "outputs") == before
    assert list((tmp_path / "scratch").glob("trainwright-tune-*")) == []

    largest = trainwright(tmp_path, "tune", "job.yaml", "--level", "extreme", "--write")
    assert largest.returncode == 0, largest.stderr
    assert "Probe" not in largest.stderr, "what was measured once is not measured again"
    assert re.search(rf"^  {max(points)} .*extreme", largest.stdout, re.MULTILINE), largest.stdout
    assert f"train:  # how\n  micro_batch_size: {max(points)}\n" in (tmp_path / "job.yaml").read_text()
    plan = json.loads(trainwright(tmp_path, "plan", "job.yaml", "train.micro_batch_size=auto", "--json").stdout)
    assert plan["layout"]["micro_batch_size"] == max(points)
    assert plan["layout"]["global_batch_size"] == 32
    assert plan["choices"]["train.micro_batch_size"]["reason"] == f"measured by tune on {found['date'][:10]}, extreme"
    other = json.loads(
        trainwright(tmp_path, "plan", "job.yaml", "train.micro_batch_size=auto", "data.max_length=32", "--json").stdout
    )
    assert "tune" not in other["choices"]["train.micro_batch_size"]["reason"]

    run = trainwright(tmp_path, "train", "job.yaml", "train.micro_batch_size=auto", "name=taken", "--dry-run")
    assert f"train.micro_batch_size = {max(points)}  (measured by tune on " in run.stderr


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job of two ranks, the second of which has memory for two samples."""
    folder = tmp_path_factory.mktemp("two-ranks")
    write_job(
        folder,
        task="hungry_task:Hungry",
        task_options={"room": 2, "ranks": [1], "message": "NCCL"},
        resources={"device": "cpu", "precision": "fp32", "ranks": 2, "balance": "off"},
    )
    return folder


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long), pytest.param("zero2", marks=pytest.mark.long)]
)
def test_one_rank_that_runs_out_of_memory_ends_the_probe_for_all(
    two_ranks: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Done-when 4: the micro-batches before it are known, nothing hangs, and no process is left."""
    monkeypatch.chdir(two_ranks)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job, plan, _ = plan_job(load_job("job.yaml", [f"resources.strategy={strategy}"]), PlanFlags())
    watch = ProbeWatch(StopAsked(), GIVES_UP_S, 0)
    probes = WorkerProbes(RunFolder(two_ranks / "probes" / job.name), job, plan, watch)
    outcome = probes.run((1, 2, 16), ())
    assert [rung.micro_batch_size for rung in outcome.rungs] == [1, 2], outcome.why
    assert all(rung.pass_s and rung.needed_bytes and rung.capacity_bytes for rung in outcome.rungs)
    assert outcome.too_large == 16
    assert outcome.why is not None
    assert "Cuda failure 2 'out of memory'" in outcome.why
    mine = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in mine if "trainwright.train" in " ".join(child.cmdline())]


def test_micro_batches_take_turns_in_one_probe(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Done-when 1: two ranks go through the same turns, and each micro-batch is as fast as in the best of its own."""
    monkeypatch.chdir(two_ranks)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job, plan, _ = plan_job(load_job("job.yaml", []), PlanFlags())
    folder = RunFolder(two_ranks / "turns" / job.name)
    outcome = WorkerProbes(folder, job, plan, ProbeWatch(StopAsked(), GIVES_UP_S, 0)).run((1, 2, 1, 2, 1, 2), ())
    assert [(rung.micro_batch_size, rung.rounds) for rung in outcome.rungs] == [(1, 3), (2, 3)], outcome.why
    told = [list(read(folder.attempt_dir(1) / f"rank_{rank}.probe.jsonl")) for rank in range(2)]
    turns = [[line for line in lines if line["what"] == "measured"] for lines in told]
    assert [line["micro_batch_size"] for line in turns[0]] == [line["micro_batch_size"] for line in turns[1]]
    for rung in outcome.rungs:
        own = [[line for line in lines if line["micro_batch_size"] == rung.micro_batch_size] for lines in turns]
        assert rung.once_s in [min(lines, key=lambda line: line["step_s"])["once_s"] for lines in own]
        assert all(len({line["needed_bytes"] for line in lines}) == 1 for lines in own), "memory is that of the first"
        assert rung.spread == max(line["spread"] for lines in own for line in lines)


def test_a_probe_ends_where_an_evaluation_or_the_host_has_no_room(
    two_ranks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation's batch is part of the answer; S2 case C: host memory is watched, and some of it left free."""
    monkeypatch.chdir(two_ranks)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    little = 'task_options={"message": "torch", "ranks": [1], "evaluation_room": 4}'
    job, plan, _ = plan_job(load_job("job.yaml", [little]), PlanFlags())
    folder = RunFolder(two_ranks / "evaluations" / job.name)
    outcome = WorkerProbes(folder, job, plan, ProbeWatch(StopAsked(), GIVES_UP_S, 0)).run((2,), (4, 6))
    assert [rung.micro_batch_size for rung in outcome.rungs] == [2] and outcome.too_large is None
    assert (outcome.evaluated, outcome.evaluation_too_large) == ((4,), 6), outcome.why

    watch = ProbeWatch(StopAsked(), GIVES_UP_S, psutil.virtual_memory().total)
    probes = WorkerProbes(RunFolder(two_ranks / "host" / job.name), job, plan, watch)
    ended = probes.run((2,), ())
    assert ended.too_large == 2 and ended.rungs == ()
    assert ended.why is not None and ended.why.startswith("host memory ran out: ")


@pytest.mark.long
def test_a_probe_that_is_killed_and_one_that_hangs_cost_only_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Done-when 4: both are told, and the third one finds what they would have found."""
    write_job(tmp_path, task="lost_task:Lost", task_options={}, train={"global_batch_size": 4, "max_steps": 4})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def start(folder: RunFolder, layout: Layout, attempt: int) -> Processes:
        """Start the ranks, and let the time of the probe begin when the second hangs and the others have ended."""
        processes = start_here(folder, layout, attempt)
        deadline_s = time.monotonic() + DEADLINE_S
        wanted: Callable[[], bool] = (folder.path / "hangs").exists if attempt == 2 else lambda: not processes.running
        while not wanted() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return processes

    options = TuneOptions(timeout_s=1.0)
    answer = tune(load_job("job.yaml"), options, open_probes=partial(WorkerProbes, start_ranks=start))
    told = capsys.readouterr().err
    assert "lost at 1, which says nothing of its memory: rank 0 was ended by SIGKILL" in told
    assert "lost at 4, which says nothing of its memory: it had not ended after 1 s" in told
    assert [point.micro_batch_size for point in answer.tuned.points] == [1, 2, 4]
    assert answer.tuned.too_large is None
    assert answer.tuned.probes in (3, 4), "the fastest take turns in one more where times differ"

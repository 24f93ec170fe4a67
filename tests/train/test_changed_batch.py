"""What is told of a run that goes on with another global batch: how far it is, and how far it has to go."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_runs import SAMPLES, CompletedRun, StartTrain, WriteJob

OLD_BATCH, NEW_BATCH = 4, 16


@pytest.fixture(scope="module")
def rebatched(tmp_path_factory: pytest.TempPathFactory, write_job: WriteJob, start_train: StartTrain) -> CompletedRun:
    """A run of one epoch, stopped after at least five steps and gone on with four times the batch."""
    folder = tmp_path_factory.mktemp("changed-batch")
    shutil.copy(Path(__file__).with_name("recording_task.py"), folder)
    job = write_job(
        folder, task="recording_task:Recording", task_options={"pause_s": 0.2}, train={"global_batch_size": OLD_BATCH}
    )
    running = start_train(job)
    running.wait_for_step(5)
    running.process.send_signal(signal.SIGTERM)
    assert running.finish().exit_code == 75
    allow = ("--allow", "train.global_batch_size")
    run = start_train(job, f"train.global_batch_size={NEW_BATCH}", *allow).finish()
    assert run.exit_code == 0, run.stderr
    return run


def told(*command: str) -> dict[str, Any]:
    """Return the JSON document of a command."""
    program = Path(sys.executable).with_name("trainwright")
    output = subprocess.run([program, *command, "--json"], capture_output=True, text=True, check=True).stdout
    document: dict[str, Any] = json.loads(output)
    return document


def test_harm_12_the_total_is_steps_done_and_those_that_remain(rebatched: CompletedRun) -> None:
    """In the lines of the steps, in the line of the log that `status` reads, in `watch`, `runs` and the report."""
    done = int(re.findall(r"Resuming from \S+ \(step (\d+),", rebatched.stderr)[0])
    total = done + -(-(SAMPLES - OLD_BATCH * done) // NEW_BATCH)
    lines = re.findall(r"^.*\bstep (\d+)/(\d+)  .*left (\S+)$", rebatched.stderr, re.MULTILINE)
    assert [(int(step), int(of_all)) for step, of_all, _ in lines] == [(s, total) for s in range(done + 1, total + 1)]
    assert lines[-1][2] == "0:00:00"
    assert f"{total} steps in all; from step {done}" in rebatched.stderr
    assert max(rebatched.steps()) == total
    folder = str(rebatched.folder)
    [listed] = [run for run in told("runs")["runs"] if run["folder"] == folder]
    [reported] = told("report", folder)["runs"]
    for told_of in (told("watch", folder, "--once")["run"], listed, reported["summary"]):
        assert (told_of["step"], told_of["total_steps"]) == (total, total)

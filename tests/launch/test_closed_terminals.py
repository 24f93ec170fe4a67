"""A terminal that is closed, a pipe whose reader has gone, signals in a burst: each is one stop, saved and recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from script_runs import LOOP, LOOP_COMMAND, ScriptRun, wait_until
from two_ranks import write_two_ranks

from trainwright.errors import ExitCode
from trainwright.runs.records import read

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from live_run import LiveRun

pytestmark = pytest.mark.timeout(600)


def hang_up(run: LiveRun) -> None:
    run.hang_up()


def three_signals(run: LiveRun) -> None:
    for _ in range(3):
        run.launcher.send_signal(signal.SIGTERM)
        time.sleep(0.02)  # signals that wait together are one


def sighup(run: LiveRun) -> None:
    run.launcher.send_signal(signal.SIGHUP)


def state_in_list(run_dir: Path) -> str:
    """Return what `trainwright runs` says of a run."""
    listed = [sys.executable, "-m", "trainwright", "runs", "--json"]
    done = subprocess.run(listed, capture_output=True, text=True, check=True)
    (state,) = [run["state"] for run in json.loads(done.stdout)["runs"] if run["folder"] == str(run_dir)]
    return str(state)


@pytest.mark.parametrize("stop", [hang_up, three_signals, sighup])
def test_harm_02_a_script_saves_and_its_run_is_recorded_as_stopped(
    tmp_path: Path, stop: Callable[[LiveRun], None]
) -> None:
    """S01, S04: exit 75, the checkpoint of the step at hand, nothing left, and the same command goes on from there.

    The save takes longer than the signals do, as it does of a real model.
    """
    (tmp_path / "loop.py").write_text(LOOP)
    script = ScriptRun(tmp_path)
    script.write_job([*LOOP_COMMAND, "--wait-at", "6", "--save-s", "1"])
    with LiveRun(tmp_path, script.folder, [], on_terminal=stop is hang_up) as run:
        run.wait_for("step 6", lambda: any(record["step"] == 6 for record in script.records()))
        stop(run)
        assert run.end() == ExitCode.STOPPED, run.said
        assert "stopped hard" not in run.said
        assert not run.processes()
    assert (script.folder / "output" / "checkpoint-6").is_dir()
    assert state_in_list(script.folder) == "stopped"
    (tmp_path / "go").touch()
    code, _, said = script.train()
    assert code == ExitCode.DONE and "Resuming from checkpoint-6" in said


def test_harm_02_a_reader_that_leaves_is_a_stop(tmp_path: Path) -> None:
    """A pipe that breaks in the middle of a run does not kill it: the step at hand is saved, exit 75."""
    (tmp_path / "loop.py").write_text(LOOP)
    script = ScriptRun(tmp_path)
    script.write_job([*LOOP_COMMAND, "--wait-at", "6", "--steps", "1000000"])
    process = script.start()
    wait_until(lambda: any(record["step"] == 6 for record in script.records()), process)
    assert process.stderr is not None
    process.stderr.close()
    (tmp_path / "go").touch()
    assert process.wait(120) == ExitCode.STOPPED
    step = script.records()[-1]["step"]
    assert 6 <= step < 1_000_000
    assert (script.folder / "output" / f"checkpoint-{step}").is_dir()
    assert [event["event"] for event in script.records("events.jsonl")][-2:] == ["stopped", "checked"]


def test_harm_02_a_run_into_head_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """`2>&1 | head -1` leaves at once, before the ranks start: it may not look like a run that is done, nor be one."""
    (tmp_path / "loop.py").write_text(LOOP)
    script = ScriptRun(tmp_path)
    script.write_job([*LOOP_COMMAND, "--wait-at", "6"])
    piped = '"$0" -m trainwright train job.yaml 2>&1 | head -1; exit "${PIPESTATUS[0]}"'
    done = subprocess.run(
        ["bash", "-c", piped, sys.executable], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == ExitCode.STOPPED, done
    assert len(done.stdout.splitlines()) == 1
    assert state_in_list(script.folder) == "stopped"
    (tmp_path / "go").touch()
    code, _, said = script.train()
    assert code == ExitCode.DONE, said


def test_harm_02_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    """Who starts a run under nohup wants it to go on when the terminal is closed."""
    (tmp_path / "loop.py").write_text(LOOP)
    script = ScriptRun(tmp_path)
    script.write_job([*LOOP_COMMAND, "--wait-at", "6"])
    with (tmp_path / "out").open("wb") as out:
        command = ["nohup", sys.executable, "-m", "trainwright", "train", "job.yaml"]
        process = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    deadline_s = time.monotonic() + 120
    while not any(record["step"] == 6 for record in script.records()):
        assert process.poll() is None and time.monotonic() < deadline_s, (tmp_path / "out").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    (tmp_path / "go").touch()
    assert process.wait(120) == ExitCode.DONE, (tmp_path / "out").read_text()


def test_harm_02_torchrun_by_hand_outlives_its_terminal_under_nohup(tmp_path: Path) -> None:
    """As launch.sh starts it; torchrun by itself takes the signal up again and ends its ranks."""
    waits = f"import pathlib, time\npathlib.Path({str(tmp_path / 'up')!r}).touch()\ntime.sleep(3)"
    (tmp_path / "waits.py").write_text(waits)
    options = ["-m", "trainwright.train.launcher", "torchrun", "--nproc-per-node=1", str(tmp_path / "waits.py")]
    pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(["nohup", sys.executable, *options], text=True, **pipe)
    while not (tmp_path / "up").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said


@pytest.mark.parametrize(
    "stop",
    [
        hang_up,
        pytest.param(three_signals, marks=pytest.mark.long),
        pytest.param(sighup, marks=pytest.mark.long),
    ],
)
def test_harm_02_the_built_in_trainer_saves_and_is_recorded_as_stopped(
    tmp_path: Path, stop: Callable[[LiveRun], None]
) -> None:
    """S01, S04: the same of two ranks of the built-in trainer."""
    run_dir = write_two_ranks(tmp_path)
    with LiveRun(tmp_path, run_dir, ["checkpoint.every=1000 steps"], on_terminal=stop is hang_up) as run:
        run.wait_for_step(3)
        stop(run)
        assert run.end() == ExitCode.STOPPED, run.said
        assert not run.processes()
    stopped = [event for event in read(run_dir / "events.jsonl") if event["event"] == "stopped"]
    assert [(event["attempt"]) for event in stopped] == [1]
    assert (run_dir / f"checkpoint-{stopped[0]['step']}").is_dir()
    assert state_in_list(run_dir) == "stopped"
    doctor = [sys.executable, "-m", "trainwright", "doctor", str(run_dir)]
    said = subprocess.run(doctor, capture_output=True, text=True, env=os.environ).stdout
    assert "undetermined" not in said.lower(), said


def test_harm_02_data_that_are_prepared_are_stopped_by_a_closed_terminal(tmp_path: Path) -> None:
    """S03: exit 75, no process left, and the next start prepares them."""
    run_dir = write_two_ranks(tmp_path)
    with LiveRun(tmp_path, run_dir, [], on_terminal=True) as run:
        run.wait_for("preparing", lambda: (run_dir / "logs" / "prepare.log").exists())
        run.hang_up()
        assert run.end() == ExitCode.STOPPED, run.said
        assert not run.processes()

"""Real runs of users' own scripts: started by their launcher, followed, stopped, resumed, their failures told."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from script_runs import LOOP, LOOP_COMMAND, ScriptRun, wait_until

from trainwright.errors import ExitCode

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_script"


@pytest.fixture
def run(tmp_path: Path) -> ScriptRun:
    (tmp_path / "loop.py").write_text(LOOP)
    return ScriptRun(tmp_path)


def test_a_stopped_script_saves_and_the_same_command_goes_on_from_its_checkpoint(run: ScriptRun) -> None:
    """Exit codes 75 and 0; the third time there is nothing to do; another command is not mixed with it."""
    run.write_job([*LOOP_COMMAND, "--wait-at", "6"])
    process = run.start()
    wait_until(lambda: any(record["step"] == 6 for record in run.records()), process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == ExitCode.STOPPED, stderr
    assert (run.folder / "output" / "checkpoint-6").is_dir()

    (run.place / "go").touch()
    code, stdout, stderr = run.train()
    assert code == 0, stderr
    assert "Resuming from checkpoint-6" in stderr
    assert stdout.strip() == str(run.folder / "output")
    assert [(record["attempt"], record["step"]) for record in run.records()] == [
        *((1, step) for step in range(1, 7)),
        *((2, step) for step in range(7, 13)),
    ]
    first = run.records()[0]
    assert first["kind"] == "train" and first["source"] == "step line"
    assert (first["loss"], first["learning_rate"], first["step_s"]) == (3.0, 1e-3, 0.25)

    code, _, stderr = run.train()
    assert code == 0 and "Already finished" in stderr
    code, _, stderr = run.train('script=[python, loop.py, --steps, "3"]')
    assert code == ExitCode.USAGE
    assert "was made by another command" in stderr and "--allow script" in stderr


def test_a_killed_rank_is_restarted_from_the_newest_checkpoint(run: ScriptRun) -> None:
    """S1-23, S1-35: the lines on processes, the checks; torchrun asks the other rank to end, which saves (step 6)."""
    run.write_job([*LOOP_COMMAND, "--wait-at", "6"], launcher="torchrun", resources={"ranks": 2})
    process = run.start()
    # The script's processes do not wait for each other: the second may start long after the first.
    second = run.folder / "logs" / "attempt_1" / "rank_1.started.json"
    wait_until(lambda: second.exists() and any(record["step"] == 6 for record in run.records()), process)
    psutil.Process(run.note(1, 1)["pid"]).children()[0].kill()
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    lines = stderr.splitlines()
    start = lines.index("Distributed environment: MULTI_CPU")
    assert lines[start + 1 : start + 3] == ["Number of processes: 2", "Number of GPUs: 0"]
    assert "rank 1 was ended by SIGKILL" in lines
    assert "Restarting (attempt 2) from step 6" in lines
    assert any(line.startswith("check warning: processes: 2 started; whether they train together") for line in lines)
    assert run.note(2, 1, "ended")["exit_code"] == 0
    assert [record["step"] for record in run.records() if record["attempt"] == 2] == list(range(7, 13))
    checked = [event for event in run.records("events.jsonl") if event["event"] == "checked"]
    assert checked[-1]["steps_per_epoch"] == pytest.approx(6, abs=0.1)


def test_a_script_that_fails_is_not_repeated_and_its_own_words_are_shown(run: ScriptRun) -> None:
    (run.place / "loop.py").write_text("import sys\nprint('reading')\nsys.exit('no such column: text')\n")
    run.write_job(["python", "loop.py"])
    code, _, stderr = run.train()
    assert code == ExitCode.FAILED
    assert stderr.count("no such column: text") == 1
    assert not (run.folder / "logs" / "attempt_2").exists()


def test_a_program_that_is_not_there_is_named(run: ScriptRun) -> None:
    run.write_job(["./no-such-program", "--x"])
    code, _, stderr = run.train()
    assert code == ExitCode.FAILED
    assert "the script does not start" in stderr and "no-such-program" in stderr


def test_no_process_outlives_a_killed_command(run: ScriptRun) -> None:
    """The launcher, its ranks and their scripts are gone with a SIGKILL of the command."""
    run.write_job([*LOOP_COMMAND, "--wait-at", "2"])
    process = run.start()
    wait_until(lambda: any(record["step"] == 2 for record in run.records()), process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_the_example_trains_in_two_processes_and_its_run_folder_shows_metrics(tmp_path: Path) -> None:
    """Done-when 6 of the issue on clusters, under `train`: accelerate, gloo, two processes that are one group."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    run = ScriptRun(tmp_path, "own-script")
    code, stdout, stderr = run.train("resources.device=cpu", "resources.ranks=2")
    assert code == 0, stderr
    assert "check ok: processes: 2 started and joined" in stderr
    records = run.records()
    assert [record["step"] for record in records] == list(range(1, 61))
    assert {record["source"] for record in records} == {"trainwright.report"}
    assert records[-1]["epoch"] == pytest.approx(2)
    assert records[-1]["loss"] < records[0]["loss"] - 1
    assert (Path(stdout.strip()) / "final_model" / "model.safetensors").is_file()
    for rank in range(2):
        assert run.note(1, rank, "ended")["exit_code"] == 0

"""How a run ended is told once, to a real webhook and on the console: runs that finish, stop, die and are killed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from receiver import Receiver
from watched_run import WatchedRun, write_watched_job

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from script_runs import DEADLINE_S, LOOP, LOOP_COMMAND, ScriptRun, wait_until

from trainwright.runs.records import read


@pytest.fixture
def run(tmp_path: Path, hook: Receiver, monkeypatch: pytest.MonkeyPatch) -> ScriptRun:
    """A job of a small script whose alerts go to the webhook."""
    monkeypatch.setenv("HOOK", hook.address)
    (tmp_path / "loop.py").write_text(LOOP)
    return ScriptRun(tmp_path)


def write_job(run: ScriptRun, *arguments: str) -> None:
    run.write_job([*LOOP_COMMAND, *arguments], launcher="python", alerts={"webhook_env": "HOOK"})


def at_step(run: ScriptRun, step: int) -> Callable[[], bool]:
    return lambda: any(record["step"] == step for record in run.records())


def told(hook: Receiver) -> list[tuple[str, int | None]]:
    return [(end["rule"], end["figures"].get("exit_code")) for end in hook.ends]


def test_harm_10_a_run_that_finishes_says_so_once_and_not_again_when_there_is_nothing_left(
    run: ScriptRun, hook: Receiver
) -> None:
    write_job(run)
    code, _, stderr = run.train()
    assert (code, told(hook)) == (0, [("run_finished", 0)])
    assert "run own finished" in stderr
    (end,) = hook.ends
    assert (end["subject"], end["attempt"], end["severity"], end["state"]) == ("own", 1, "note", "fired")
    assert run.train()[0] == 0
    assert len(hook.ends) == 1


def test_harm_10_a_run_that_is_stopped_says_so_once(run: ScriptRun, hook: Receiver) -> None:
    write_job(run, "--wait-at", "6")
    process = run.start()
    wait_until(at_step(run, 6), process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, told(hook)) == (75, [("run_stopped", 75)])


def test_harm_10_a_rank_that_is_killed_and_restarted_is_no_failed_run(run: ScriptRun, hook: Receiver) -> None:
    write_job(run, "--wait-at", "6")
    process = run.start()
    wait_until(at_step(run, 6), process)
    os.kill(run.note(1, 0)["pid"], signal.SIGKILL)
    wait_until((run.folder / "logs" / "attempt_2" / "rank_0.started.json").exists, process)
    (run.place / "go").touch()
    process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, told(hook)) == (0, [("run_finished", 0)])


def test_harm_10_a_launcher_that_is_killed_is_told_of_by_what_outlives_it(run: ScriptRun, hook: Receiver) -> None:
    write_job(run, "--wait-at", "6")
    process = run.start()
    wait_until(at_step(run, 6), process)
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    deadline_s = time.monotonic() + DEADLINE_S
    while not hook.ends and time.monotonic() < deadline_s:
        time.sleep(0.05)
    (end,) = hook.ends
    assert end["rule"] == "run_failed" and f"pid {process.pid}" in end["what"]
    (run.place / "go").touch()
    assert run.train()[0] == 0
    assert [rule for rule, _ in told(hook)] == ["run_failed", "run_finished"]


def test_harm_10_a_start_that_is_refused_by_the_lock_says_nothing_of_the_run_that_goes_on(
    run: ScriptRun, hook: Receiver
) -> None:
    write_job(run, "--wait-at", "6")
    process = run.start()
    wait_until(at_step(run, 6), process)
    assert run.train()[0] == 2
    (run.place / "go").touch()
    process.communicate(timeout=DEADLINE_S)
    assert told(hook) == [("run_finished", 0)]


def test_harm_10_a_built_in_run_that_dies_says_so_and_why_to_command_and_webhook(
    tmp_path: Path, hook: Receiver
) -> None:
    """The ranks raise in a step: one message on each way, with rank and error."""
    out = tmp_path / "told"
    save = "import os, sys; open(sys.argv[1], 'a').write(os.environ['TRAINWRIGHT_ALERT_WHAT'] + '\\n')"
    alerts = {"webhook_env": "HOOK", "command": [sys.executable, "-c", save, str(out)]}
    job = write_watched_job(tmp_path, alerts=alerts, task="dying_task:Dying", task_options={})
    shutil.copy(Path(__file__).with_name("dying_task.py"), tmp_path)
    started = WatchedRun.start(job, HOOK=hook.address)
    assert started.process.wait(DEADLINE_S) == 1
    (end,) = hook.ends
    assert (end["rule"], end["figures"]["exit_code"], end["attempt"]) == ("run_failed", 1, 1)
    assert end["what"].startswith("run live failed: rank ") and "the batch makes no sense" in end["what"]
    assert end["what"] in out.read_text().splitlines()
    assert f"run live failed: trainwright doctor {started.folder}" in started.console.read_text()
    assert [event["event"] for event in read(started.folder / "events.jsonl")].count("failed") == 1

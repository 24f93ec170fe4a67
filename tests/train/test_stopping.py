"""Stopping, crashing and being killed: the run ends in a clean state, says why, and the same command goes on."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from disturbed_runs import (
    LiveRun,
    WriteDropoutJob,
    assert_same_end,
    finish,
    ledger,
    newest_step,
)
from real_runs import RunTrain, WriteJob

from trainwright.runs.records import read

PROMPTLY_S = 15.0
"""From the signal to the end, on a machine that may be busy: one step, one save, and the interpreters' exit."""


WAYS_TO_STOP: dict[str, Callable[[LiveRun], None]] = {
    "SIGTERM to the launcher": lambda run: run.launcher.send_signal(signal.SIGTERM),
    "SIGTERM to rank 0": lambda run: run.ranks()[0].send_signal(signal.SIGTERM),
    "SIGTERM to rank 1": lambda run: run.ranks()[1].send_signal(signal.SIGTERM),
    "Ctrl+C on a terminal": lambda run: run.press(b"\x03"),
    "SIGUSR2 to the launcher": lambda run: run.launcher.send_signal(signal.SIGUSR2),
    "SIGHUP to rank 1": lambda run: run.ranks()[1].send_signal(signal.SIGHUP),
}


@pytest.mark.long
def test_a_run_stopped_in_every_way_goes_on_with_the_same_command(
    dropout_job: WriteDropoutJob, undisturbed: Path, tmp_path: Path
) -> None:
    """S01, S02, S05, S07, T-15: six stops, each saved by all ranks at one step with exit 75, and nothing is asked."""
    folder, run_dir = dropout_job(tmp_path), tmp_path / "runs" / "run"
    for number, (way, stop) in enumerate(WAYS_TO_STOP.items(), start=1):
        with LiveRun(folder, run_dir, [], on_terminal="terminal" in way) as run:
            run.wait_for_step(newest_step(run_dir) + 2)
            stop(run)
            asked_s = time.monotonic()
            assert run.end() == 75, f"{way}: {run.said}"
            assert time.monotonic() - asked_s < PROMPTLY_S, way
            assert not run.processes(), way
        stopped_at = ledger(run_dir)[-1]["step"]
        assert run.attempt == number, f"{way}: {run.said}"
        assert newest_step(run_dir) == stopped_at, way
        assert f"stopped at step {stopped_at}, saved" in run.said, way
    finish(folder, run_dir)
    assert_same_end(run_dir, undisturbed)
    with LiveRun(folder, run_dir, []) as again:
        assert again.end() == 0, again.said
        assert "Already finished" in again.said
        assert again.attempt == len(WAYS_TO_STOP) + 1


@pytest.mark.long
def test_a_stop_is_clean_in_every_phase_of_a_run(
    dropout_job: WriteDropoutJob, undisturbed: Path, tmp_path: Path
) -> None:
    """S03: SIGTERM while data are prepared, as ranks start, in a save, in an evaluation, and at the very end."""
    run_dir = tmp_path / "runs" / "run"
    held_out = ({"question": f"What is {number}?", "answer": f"It is {number}."} for number in range(400))
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    folder = dropout_job(
        tmp_path,
        data={"eval_path": str(tmp_path / "eval.jsonl")},
        checkpoint={"every": "10 steps"},
        eval={"every": "15 steps", "batch_size": 1},
    )

    def evaluating(run: LiveRun) -> bool:
        trained = [row["step"] for row in ledger(run_dir)]
        evaluated = [row["step"] for row in read(run_dir / "metrics.jsonl") if row["kind"] == "eval"]
        return bool(trained) and trained[-1] % 15 == 0 and trained[-1] > max(evaluated, default=0)

    phases: dict[str, Callable[[LiveRun], object]] = {
        "preparing": lambda run: (run_dir / "logs" / "prepare.log").exists(),
        "starting": lambda run: run.attempt > run.attempt_before and run.ranks(),
        "saving": lambda run: run.staging(),
        "evaluating": evaluating,
        "ending": lambda run: list(run_dir.glob(".staging-final-*")) or (run_dir / "final_model").exists(),
    }
    for phase, reached in phases.items():
        with LiveRun(folder, run_dir, []) as run:
            run.wait_for(phase, lambda run=run, reached=reached: reached(run))
            run.launcher.send_signal(signal.SIGTERM)
            asked_s = time.monotonic()
            code = run.end()
            # A stop in the start-up waits for the imports: ranks agree on it at the first step boundary.
            assert time.monotonic() - asked_s < (60 if phase == "starting" else PROMPTLY_S), phase
            assert code == (0 if phase == "ending" else 75), f"{phase}: {run.said}"
            assert not run.processes(), phase
        assert not [path.name for path in run_dir.glob(".*")], phase
        if phase != "preparing":
            assert newest_step(run_dir) == ledger(run_dir)[-1]["step"], phase
    assert_same_end(run_dir, undisturbed)


@pytest.mark.long
def test_the_third_ctrl_c_ends_a_run_that_does_not_stop(dropout_job: WriteDropoutJob, tmp_path: Path) -> None:
    """S04: two requests wait for a step boundary that does not come; the third ends all at once, nothing is lost."""
    asleep = tmp_path / "asleep"
    asleep.touch()
    folder = dropout_job(
        tmp_path,
        task="faulty_task:Faulty",
        task_options={"fault": "sleep", "step": 8, "while_file": str(asleep)},
        train={"global_batch_size": 8, "micro_batch_size": 4, "max_steps": 12},
        checkpoint={"every": "5 steps"},
    )
    run_dir = tmp_path / "runs" / "run"
    with LiveRun(folder, run_dir, []) as run:
        run.wait_for_step(7)
        for _ in range(2):
            run.launcher.send_signal(signal.SIGINT)
            time.sleep(1)
            assert run.launcher.poll() is None, run.said
        run.launcher.send_signal(signal.SIGINT)
        assert run.end(within_s=5) == 1, run.said
        assert "stopped hard" in run.said
        assert not run.processes()
    assert newest_step(run_dir) == 5
    asleep.unlink()
    with LiveRun(folder, run_dir, []) as run:
        assert run.end() == 0, run.said
        assert "Resuming from checkpoint-5" in run.said


def test_a_rank_ends_well_whatever_its_threads_still_hold(
    dropout_job: WriteDropoutJob, run_train: RunTrain, tmp_path: Path
) -> None:
    """A thread of gloo's that asks for the interpreter while it shuts down aborts the process (before Python 3.14)."""
    folder = dropout_job(tmp_path, task="unawaited_task:Unawaited")
    shutil.copy(Path(__file__).with_name("unawaited_task.py"), folder)
    done = run_train(folder / "job.yaml", "train.max_steps=2", "--max-restarts", "0")
    assert done.exit_code == 0, done.stderr
    assert "terminate called" not in done.stderr


def test_a_crash_that_would_come_again_is_shown_and_not_repeated(dropout_job: WriteDropoutJob, tmp_path: Path) -> None:
    """S08, G5: rank 1 raises at step 7; its own traceback is shown under its name, once, and not what rank 0 felt."""
    folder = dropout_job(tmp_path, task="faulty_task:Faulty", task_options={"fault": "raise", "step": 7, "rank": 1})
    with LiveRun(folder, tmp_path / "runs" / "run", []) as run:
        assert run.end() == 1, run.said
    assert "rank 1" in run.said
    assert "in loss_sum" in run.said
    assert run.said.count("ZeroDivisionError: the seventh row is not what it seems") == 1
    assert "closed by peer" not in run.said
    assert run.attempt == 1
    assert ledger(run.run_dir)[-1]["step"] == 6


@pytest.mark.long
def test_nothing_survives_a_killed_launcher_and_the_same_command_goes_on(
    dropout_job: WriteDropoutJob, undisturbed: Path, tmp_path: Path
) -> None:
    """S09, C01, G7: killed in three phases, it takes every process with it within ten seconds and leaves no lock."""
    folder, run_dir = dropout_job(tmp_path, checkpoint={"every": "2 steps"}), tmp_path / "runs" / "run"
    phases: dict[str, Callable[[LiveRun], object]] = {
        "preparing": lambda run: run.processes(),
        "starting": lambda run: run.attempt > run.attempt_before and run.ranks(),
        "saving": lambda run: run.attempt > run.attempt_before and run.last_step(run.attempt) > 3 and run.staging(),
    }
    for phase, reached in phases.items():
        with LiveRun(folder, run_dir, []) as run:
            run.wait_for(phase, lambda run=run, reached=reached: reached(run))
            run.launcher.kill()
            assert run.vanish() < 10, phase
    assert newest_step(run_dir) >= 2
    finish(folder, run_dir)
    assert_same_end(run_dir, undisturbed)


@pytest.mark.long
def test_a_killed_rank_is_named_and_the_run_ends_as_if_nothing_had_been(
    dropout_job: WriteDropoutJob, undisturbed: Path, tmp_path: Path
) -> None:
    """S10, M08, G5: each rank is killed once; the launcher says which and by what, guesses nothing, and goes on."""
    asleep = tmp_path / "asleep"
    asleep.touch()
    folder = dropout_job(
        tmp_path,
        task="faulty_task:Faulty",
        task_options={"fault": "sleep", "step": 8, "while_file": str(asleep)},
        checkpoint={"every": "5 steps"},
    )
    with LiveRun(folder, tmp_path / "runs" / "run", []) as run:
        attempt = 0
        for victim in (1, 0):
            ranks = run.wait_for_ranks(2, after_attempt=attempt)
            attempt = run.attempt
            run.wait_for("steps", lambda attempt=attempt: run.last_step(attempt) == (run.start_step(attempt) or 0) + 7)
            if victim == 0:
                asleep.unlink()
            ranks[victim].kill()
        assert run.end() == 0, run.said
    assert run.said.count("rank 1 was ended by SIGKILL") == 1
    assert run.said.count("rank 0 was ended by SIGKILL") == 1
    assert "memory." not in run.said.lower().replace("out of memory", "memory.")
    assert [record["rank"] for record in read(run.run_dir / "events.jsonl") if record["event"] == "failed"] == [1, 0]
    assert run.attempt == 3
    assert_same_end(run.run_dir, undisturbed)


@pytest.mark.long
def test_two_runs_at_once_share_no_port_and_listen_on_this_machine_only(
    dropout_job: WriteDropoutJob, undisturbed: Path, tmp_path: Path
) -> None:
    """S11, X08: two runs started in the same moment both end well; every listening socket is on loopback."""
    folder = dropout_job(tmp_path)
    with (
        LiveRun(folder, tmp_path / "runs" / "one", ["name=one"]) as one,
        LiveRun(folder, tmp_path / "runs" / "two", ["name=two"]) as two,
    ):
        listening = set()
        for run in (one, two):
            run.wait_for_step(3)
            for process in [psutil.Process(run.launcher.pid), *run.ranks()]:
                listening |= {
                    (connection.laddr.ip, connection.laddr.port)
                    for connection in process.net_connections(kind="inet")
                    if connection.status == psutil.CONN_LISTEN
                }
        assert one.end() == 0, one.said
        assert two.end() == 0, two.said
    assert {address for address, _ in listening} == {"127.0.0.1"}, listening
    assert len({port for _, port in listening}) >= 2
    for run in (one, two):
        assert_same_end(run.run_dir, undisturbed)


def test_four_ranks_go_on_bit_for_bit(write_job: WriteJob, run_train: RunTrain, tmp_path: Path) -> None:
    """R01: more than two ranks, whose sums depend on where a gradient lies in DDP's buckets."""
    job = write_job(
        tmp_path,
        train={"global_batch_size": 8, "micro_batch_size": 2, "max_steps": 6},
        checkpoint={"every": "3 steps"},
        resources={"ranks": 4, "strategy": "ddp"},
    )
    whole = run_train(job)
    assert whole.exit_code == 0, whole.stderr
    weights = (whole.folder / "final_model" / "model.safetensors").read_bytes()
    for later in ("checkpoint-6", "final_model"):
        shutil.rmtree(whole.folder / later)
    again = run_train(job)
    assert "Resuming from checkpoint-3" in again.stderr and "Contract: exact" in again.stderr
    assert (again.folder / "final_model" / "model.safetensors").read_bytes() == weights

"""Evaluations that are killed, stopped and continued with other numbers of workers; with real processes and signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from evaluations import (
    DEADLINE_S,
    QUESTIONS,
    answered,
    close_gate,
    held,
    is_gone,
    results,
    run,
    start,
    wait_until,
    without_times,
    write_benchmark,
)

from trainwright.errors import ExitCode

COMPARED = ("eval.yaml", "--compare", "fixed:1", "no-retrieval")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return the results of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    write_benchmark(folder)
    done = run(folder, *COMPARED)
    assert done.returncode == ExitCode.DONE, done.stderr
    return results(folder)


def same_results(found: dict[str, object], whole: dict[str, object]) -> bool:
    """Say whether two results files tell the same of every question and of all of them, to the last digit."""
    keys = ("config", "fixed_strategy", "no_retrieval_strategy", "improvement", "comparisons", "answered_twice")
    return all(without_times(found[key]) == without_times(whole[key]) for key in keys)


def test_two_then_one_then_three_workers_with_kills_come_to_the_figures_of_one_whole_run(
    tmp_path: Path, whole: dict[str, object]
) -> None:
    """Issue 6, done-when 5; E01, E02: each of 23 questions scored once, figures equal; no answer is asked for again."""
    write_benchmark(tmp_path)
    gate = tmp_path / "gate"
    before = 0
    for workers in (2, 1):
        close_gate(gate, workers, before_call=3)
        evaluation = start(tmp_path, *COMPARED, "--workers", str(workers), gate=gate)
        for worker in held(gate, workers):
            os.kill(worker, signal.SIGKILL)
        _, said = evaluation.communicate(timeout=DEADLINE_S)
        assert evaluation.returncode == ExitCode.FAILED, said
        assert "every worker was ended from outside" in said
        assert "run the same command to go on" in said
        assert "Traceback" not in said
        # Each engine answered two calls of two questions, and lost the two it was asked.
        assert answered(tmp_path) == before + 4 * workers
        before = answered(tmp_path)
    (gate / "hold").unlink()
    last = run(tmp_path, *COMPARED, "--workers", "3", gate=gate)
    assert last.returncode == ExitCode.DONE, last.stderr
    assert f"Going on: {before} of {2 * QUESTIONS} are answered already" in last.stderr
    assert answered(tmp_path) == 2 * QUESTIONS
    assert same_results(results(tmp_path), whole)


def test_the_questions_of_a_killed_worker_go_to_the_others(tmp_path: Path, whole: dict[str, object]) -> None:
    """E01: one of two workers is killed while it answers; the same command finishes."""
    write_benchmark(tmp_path)
    gate = tmp_path / "gate"
    close_gate(gate, 1, before_call=2)
    evaluation = start(tmp_path, *COMPARED, "--workers", "2", gate=gate)
    [victim] = held(gate, 1)
    os.kill(victim, signal.SIGKILL)
    _, said = evaluation.communicate(timeout=DEADLINE_S)
    assert evaluation.returncode == ExitCode.DONE, said
    assert "was ended by SIGKILL; 2 open questions go back to the queue" in said
    assert same_results(results(tmp_path), whole)


def test_a_slow_worker_takes_fewer_questions(tmp_path: Path) -> None:
    """Issue 6, modes: the queue gives to whoever is ready; one worker stands still until the other did the rest."""
    write_benchmark(tmp_path)
    gate = tmp_path / "gate"
    close_gate(gate, 1, before_call=1)
    evaluation = start(tmp_path, "eval.yaml", "policies=[fixed:1]", "--workers", "2", gate=gate)
    held(gate, 1)
    wait_until(lambda: answered(tmp_path) == QUESTIONS - 2)
    (gate / "open").touch()
    _, said = evaluation.communicate(timeout=DEADLINE_S)
    assert evaluation.returncode == ExitCode.DONE, said
    counts = [path.read_bytes().count(b"\n") for path in tmp_path.glob("results/*/*.lines/worker-*.jsonl")]
    assert sorted(counts) == [2, QUESTIONS - 2]


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(tmp_path: Path, whole: dict[str, object]) -> None:
    """Issue 6, files: exit code 75, answers are kept, no process is left; once finished, nothing is left to do."""
    write_benchmark(tmp_path)
    gate = tmp_path / "gate"
    close_gate(gate, 1, before_call=4)
    evaluation = start(tmp_path, *COMPARED, gate=gate)
    [worker] = held(gate, 1)
    evaluation.send_signal(signal.SIGINT)
    _, said = evaluation.communicate(timeout=DEADLINE_S)
    assert evaluation.returncode == ExitCode.STOPPED, said
    assert f"stopped with 6 of {2 * QUESTIONS} answered; run the same command to go on" in said
    assert is_gone(worker)
    (gate / "hold").unlink()
    assert run(tmp_path, *COMPARED, gate=gate).returncode == ExitCode.DONE
    assert same_results(results(tmp_path), whole)
    again = run(tmp_path, *COMPARED)
    assert again.returncode == ExitCode.DONE
    assert f"All {2 * QUESTIONS} are answered already" in again.stderr
    assert "COMPARISON RESULTS" in again.stdout


@pytest.mark.parametrize("way", ["terminal", "reader", "burst"])
def test_harm_02_who_closes_an_evaluations_terminal_stops_it_and_it_goes_on(
    tmp_path: Path, whole: dict[str, object], way: str
) -> None:
    """S01, S04: SIGHUP, a pipe that nobody reads any more and SIGTERM in a burst are each a stop with exit code 75."""
    write_benchmark(tmp_path)
    gate = tmp_path / "gate"
    close_gate(gate, 1, before_call=4)
    evaluation = start(tmp_path, *COMPARED, gate=gate)
    [worker] = held(gate, 1)
    assert evaluation.stderr is not None
    if way == "terminal":
        evaluation.send_signal(signal.SIGHUP)
    elif way == "burst":
        for _ in range(3):
            evaluation.send_signal(signal.SIGTERM)
    else:
        evaluation.stderr.close()
        (gate / "open").touch()  # the next line that it prints finds nobody
    assert evaluation.wait(DEADLINE_S) == ExitCode.STOPPED
    assert is_gone(worker)
    (gate / "hold").unlink(missing_ok=True)
    assert run(tmp_path, *COMPARED, gate=gate).returncode == ExitCode.DONE
    assert same_results(results(tmp_path), whole)


def test_workers_die_with_a_killed_command(tmp_path: Path) -> None:
    """Issue 6, files: SIGKILL of the command itself leaves no worker, and no lock that keeps the next one out."""
    write_benchmark(tmp_path)
    gate = tmp_path / "gate"
    close_gate(gate, 2, before_call=2)
    evaluation = start(tmp_path, *COMPARED, "--workers", "2", gate=gate)
    workers = held(gate, 2)
    evaluation.kill()
    evaluation.communicate(timeout=DEADLINE_S)
    for worker in workers:
        wait_until(lambda worker=worker: is_gone(worker))  # type: ignore[misc]
    (gate / "hold").unlink()
    done = run(tmp_path, *COMPARED, gate=gate)
    assert done.returncode == ExitCode.DONE, done.stderr

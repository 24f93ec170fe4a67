"""Real runs that hang, as their user sees them: on the console, by `trainwright doctor`, and in the exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from live_run import PATIENCE_S, TINY_GPT2, LiveRun

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([BENCHMARKS, os.environ.get("PYTHONPATH", "")])}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the state of processes is read from /proc")


def write_hanging(folder: Path, *, ranks: int, timeout_s: float, steps: int, **options: Any) -> Path:
    """Write the job of a run that hangs as `options` say, and return its run folder."""
    rows = [{"question": f"Question {number}?", "answer": f"It is {number}."} for number in range(48)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "name": "run",
        "output_dir": str(folder / "runs"),
        "task": "hanging_task:Hanging",
        "task_options": options,
        "model": {"from_scratch": TINY_GPT2, "tokenizer": {"vocab_size": 400}},
        "data": {"path": "rows.jsonl", "max_length": 64, "cache_dir": "cache"},
        "train": {"global_batch_size": 8, "learning_rate": 1e-3, "max_steps": steps},
        "checkpoint": {"every": "1000 steps"},
        "resources": {"device": "cpu", "precision": "fp32", "ranks": ranks, "hang_timeout_s": timeout_s},
        "tracking": [],
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "runs" / "run"


def ask_doctor(run_dir: Path) -> tuple[int, dict[str, Any]]:
    """Return the exit status of `trainwright doctor RUN --json`, and its diagnosis."""
    command = [sys.executable, "-m", "trainwright", "doctor", run_dir, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["diagnosis"]


def ask_until(run_dir: Path, cause: str) -> dict[str, Any]:
    """Ask the doctor until it says that: a machine that is busy may have a run rest for seconds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        code, diagnosis = ask_doctor(run_dir)
        assert code == (diagnosis["cause"] != "healthy"), diagnosis
        if diagnosis["cause"] == cause:
            return diagnosis
        assert time.monotonic() < deadline_s, diagnosis


def said_in(diagnosis: dict[str, Any]) -> str:
    return "\n".join(item["text"] for item in diagnosis["evidence"])


def wait_for_end(is_over: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_over():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.long
def test_a_rank_that_sleeps_is_named_with_its_line_and_the_run_ends_with_76(tmp_path: Path) -> None:
    """H01, G5, G7, G10: the line that it sleeps at, the collective that the others wait in, and nothing left alive."""
    run_dir = write_hanging(tmp_path, ranks=2, timeout_s=8, steps=400, fault="sleep", rank=1)
    with LiveRun(tmp_path, run_dir, ["--max-restarts", "0"], environment=ENVIRONMENT) as run:
        assert run.end(2 * PATIENCE_S) == 76, run.said
        wait_for_end(lambda: not run.processes())
    assert "the run stands still: rank 1 stands still in `forward` of step 4 at hanging_task.py:" in run.said
    assert "in _hang; the others wait for it" in run.said and "time.sleep" not in run.said
    assert "rank 0 is in `communication` of step 4" in run.said and "gloo:all_reduce" in run.said
    attempt = run_dir / "logs" / "attempt_1"
    assert "_engine_run_backward" in (attempt / "stack_rank_0.txt").read_text()
    assert "in _hang" in (attempt / "stack_rank_1.txt").read_text()
    code, diagnosis = ask_doctor(run_dir)
    assert (code, diagnosis["cause"], diagnosis["rank"]) == (1, "hang", 1)
    assert "in _hang" in said_in(diagnosis) and "stack_rank_*.txt" in " ".join(diagnosis["fixes"])


def test_a_stopped_rank_is_named_while_the_run_hangs_and_after(tmp_path: Path) -> None:
    """H02: `doctor` on the run while it is well, while it hangs, and once its launcher has ended it."""
    run_dir = write_hanging(tmp_path, ranks=2, timeout_s=30, steps=100_000, pass_s=0.05)
    with LiveRun(tmp_path, run_dir, ["--max-restarts", "0"], environment=ENVIRONMENT) as run:
        run.wait_for_step(5)
        well = said_in(ask_until(run_dir, "healthy"))
        for figure in ("of 100,000", "s a step", "tokens/s", "loss", "min left", "rank 1 in `"):
            assert figure in well, well
        ranks = run.ranks()
        ranks[1].send_signal(signal.SIGSTOP)
        live = ask_until(run_dir, "hang/stopped")
        assert live["rank"] == 1 and f"pid {ranks[1].pid}" in said_in(live)
        assert run.end(2 * PATIENCE_S) == 76, run.said
        wait_for_end(lambda: not run.processes())
    assert f"rank 1 (pid {ranks[1].pid}) is stopped (state T) by a SIGSTOP; the others wait for it" in run.said
    code, after = ask_doctor(run_dir)
    assert (code, after["cause"], after["rank"]) == (1, "hang/stopped", 1)
    assert after["evidence"][0]["place"] == "hang.json"


@pytest.mark.long
def test_a_stuck_data_worker_is_data_starvation_and_the_run_goes_on_after_a_restart(tmp_path: Path) -> None:
    """H06, and the restart by policy: the worker's pid and line; the second attempt is not disturbed and finishes."""
    run_dir = write_hanging(tmp_path, ranks=1, timeout_s=8, steps=12, fault="stuck-worker", rank=0, once=True)
    with LiveRun(tmp_path, run_dir, [], environment=ENVIRONMENT) as run:
        assert run.end(2 * PATIENCE_S) == 0, run.said
        wait_for_end(lambda: not run.processes())
    hang = json.loads((run_dir / "logs" / "attempt_1" / "hang.json").read_text())
    assert (hang["kind"], hang["rank"]) == ("data-starvation/stuck", 0)
    assert "pt_data_worker" in hang["why"] and "in __getitem__" in hang["why"], hang
    assert any("the thread that makes its batches stands at" in line for line in hang["shown"]), hang
    assert f"the run stands still: {hang['why']}" in run.said and "Restarting (attempt 2)" in run.said
    assert ask_doctor(run_dir)[0] == 0, "what hung went on and came to its end"

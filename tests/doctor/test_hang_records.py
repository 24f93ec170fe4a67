"""What the launcher found of a hang, as the doctor tells it afterwards; and of a run that is alive, by its files."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trainwright.doctor.after import diagnose
from trainwright.doctor.finding import HEALTHY, Finding

WHY = "rank 1 stands still in `forward` of step 4 at task.py:69 in normalise; the others wait for it"
HANG = {"schema_version": 1, "kind": "hang", "ranks": [1], "why": WHY, "shown": ["rank 0 is elsewhere"], "rank": 1}
FAILED = {"event": "failed", "attempt": 1, "rank": 1, "exit_code": 76, "text": WHY, "hang": "hang"}
LAYOUT = {
    "ranks": 2,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "global_batch_size": 8,
    "eval_batch_size": 12,
    "gradient_checkpointing": False,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run leaves whose first attempt hung."""
    run = tmp_path / "run"
    attempt = run / "logs" / "attempt_1"
    attempt.mkdir(parents=True)
    (run / "ranks").mkdir()
    job = {"train": {"learning_rate": 1e-3}, "resources": {"hang_timeout_s": 600}}
    for name, content in (
        ("run.json", {"run_id": "0" * 32}),
        ("fence.json", {"attempt": 1}),
        ("plan.json", {"layout": LAYOUT, "learning_rate": 1e-3}),
        ("resolved.json", job),
        ("logs/attempt_1/hang.json", HANG),
    ):
        (run / name).write_text(json.dumps(content))
    (attempt / "rank_0.log").write_text("step 3/400  epoch 0.1  loss 2.0\n")
    (attempt / "stack_rank_0.txt").touch()
    note(run, {"event": "started", "attempt": 1}, FAILED)
    return run


def note(run: Path, *events: dict[str, Any]) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def beat(run: Path, rank: int, section: str, there_s: float, *, silent_s: float = 0.5) -> None:
    """Write a heartbeat of a rank on another machine, which nobody answers for."""
    now_s = time.time()
    record = {
        "attempt": 1,
        "rank": rank,
        "node": "elsewhere",
        "pid": 1,
        "time_s": now_s - silent_s,
        "step": 7,
        "steps_total": 7,
        "total_steps": 400,
        "section": section,
        "section_since_s": now_s - there_s,
    }
    (run / "ranks" / f"rank_{rank}.json").write_text(json.dumps(record))


@contextmanager
def held(run: Path) -> Iterator[None]:
    """The lock that a launcher holds."""
    with (run / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def found(run: Path) -> Finding:
    return diagnose([run]).finding


def test_what_the_launcher_found_is_the_cause(run: Path) -> None:
    finding = found(run)
    assert (finding.cause, finding.rank, finding.confidence) == ("hang", 1, "certain")
    assert finding.evidence[0].text == WHY and "rank 1" in finding.title
    assert any(f"{run}/logs/latest/stack_rank_*.txt" in fix for fix in finding.fixes)


def test_a_hang_that_a_restart_has_mended_is_no_cause(run: Path) -> None:
    note(run, {"event": "started", "attempt": 2}, {"event": "finished", "attempt": 2, "step": 400})
    assert found(run).cause == HEALTHY


def test_a_hang_that_nobody_is_at_fault_of_is_not_said_with_confidence(run: Path) -> None:
    (run / "logs/attempt_1/hang.json").write_text(json.dumps(HANG | {"ranks": [], "rank": None}))
    finding = found(run)
    assert (finding.cause, finding.rank, finding.confidence) == ("hang", None, "likely")


@pytest.mark.usefixtures("_nobody_answers")
class TestAlive:
    """A run whose launcher holds its lock."""

    def test_one_that_gets_on_is_told_of_with_figures(self, run: Path) -> None:
        note(run, {"event": "started", "attempt": 1})
        steps = [
            {"kind": "train", "attempt": 1, "step": n, "loss": 2.5, "step_s": 3.0, "tokens_per_s": 800}
            for n in range(1, 8)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        beat(run, 0, "communication", 2)
        beat(run, 1, "forward", 1)
        with held(run):
            finding = found(run)
        assert finding.cause == HEALTHY
        text = finding.evidence[0].text
        assert "step 7 of 400, 3 s a step, 800 tokens/s, loss 2.5, 19.6 min left (measured)" in text
        assert "rank 0 in `communication`, rank 1 in `forward`" in text

    def test_a_tenth_of_the_time_out_is_told_to_who_asks(self, run: Path) -> None:
        note(run, {"event": "started", "attempt": 1})
        beat(run, 0, "communication", 62)
        beat(run, 1, "forward", 61)
        with held(run):
            finding = found(run)
        assert (finding.cause, finding.rank) == ("hang", 1) and finding.evidence[0].place == "ranks"

    def test_a_save_may_take_longer_than_that(self, run: Path) -> None:
        note(run, {"event": "started", "attempt": 1})
        beat(run, 0, "communication", 200)
        beat(run, 1, "save", 200)
        with held(run):
            assert found(run).cause == HEALTHY

    def test_one_rank_without_a_sign_of_life_is_told_of_at_once(self, run: Path) -> None:
        note(run, {"event": "started", "attempt": 1})
        beat(run, 0, "communication", 12)
        beat(run, 1, "forward", 13, silent_s=12)
        with held(run):
            finding = found(run)
        assert (finding.cause, finding.rank) == ("hang/silent", 1)


@pytest.fixture
def _nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are figures in files, so that nobody need be waited for."""
    monkeypatch.setattr("trainwright.launch.hangs.evidence.ANSWER_S", 0.0)

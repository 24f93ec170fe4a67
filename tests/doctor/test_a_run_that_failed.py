"""`trainwright doctor RUN` on a run that really failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from live_run import TINY_GPT2, LiveRun

FAULTY_TASK = str(Path(__file__).resolve().parents[1] / "train")


def test_the_rank_that_raised_is_named_with_its_place(tmp_path: Path) -> None:
    """Two real ranks; rank 1's task raises at its seventh step. G5, done-when 1."""
    rows = [{"question": f"{number} + 1?", "answer": f"{number + 1}."} for number in range(64)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "name": "run",
        "output_dir": str(tmp_path / "runs"),
        "model": {"from_scratch": TINY_GPT2, "tokenizer": {"vocab_size": 300}},
        "data": {"path": str(tmp_path / "data.jsonl"), "max_length": 64, "cache_dir": str(tmp_path / "cache")},
        "task": "faulty_task:Faulty",
        "task_options": {"fault": "raise", "step": 7, "rank": 1},
        "train": {"global_batch_size": 4, "max_steps": 50},
        "resources": {"device": "cpu", "precision": "fp32", "ranks": 2},
        "tracking": [],
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    run_dir = tmp_path / "runs" / "run"
    with LiveRun(tmp_path, run_dir, [], environment={"PYTHONPATH": FAULTY_TASK}) as run:
        assert run.end() == 1, run.said
    command = [sys.executable, "-m", "trainwright", "doctor", run_dir]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1, done.stderr
    diagnosis = json.loads(done.stdout)["diagnosis"]
    assert (diagnosis["cause"], diagnosis["rank"]) == ("exception", 1)
    assert "ZeroDivisionError" in diagnosis["title"]
    assert "faulty_task.py" in " ".join(diagnosis["fixes"])
    # A rank that is ended while it speaks has its last words in the launcher's record alone.
    places = {item["place"].rpartition(":")[0] for item in diagnosis["evidence"]}
    assert places in ({"attempt_1/rank_1.log"}, {"events.jsonl"})
    text = subprocess.run(command, capture_output=True, text=True).stdout
    assert text.startswith("Cause: the program raised ZeroDivisionError")
    assert f"trainwright train {run_dir}/resolved.json" in text

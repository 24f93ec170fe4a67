"""A job of two ranks and 240 steps, for tests that start it on two nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from live_run import TINY_GPT2


def write_two_ranks(folder: Path) -> Path:
    """Write job.yaml and its data, and return the run folder."""
    rows = [{"question": f"Question {number}?", "answer": f"It is {number}."} for number in range(48)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "name": "run",
        "output_dir": str(folder / "runs"),
        "model": {"from_scratch": TINY_GPT2, "tokenizer": {"vocab_size": 400}},
        "data": {"path": "rows.jsonl", "max_length": 64, "cache_dir": "cache"},
        "train": {"global_batch_size": 8, "learning_rate": 1e-3, "num_train_epochs": 40.0},
        "checkpoint": {"every": "10 steps"},
        "resources": {"device": "cpu", "precision": "fp32", "ranks": 2, "strategy": "ddp"},
        "tracking": [],
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "runs" / "run"

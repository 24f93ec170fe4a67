"""A small job whose device has a limit, for tests that tune it, and what they watch while they do."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from live_run import TINY_GPT2

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def write_job(folder: Path, **sections: Any) -> Path:
    """Write job.yaml with a tiny gpt2 on questions of different lengths, and the tasks beside it; sections merge."""
    draw = random.Random(11)
    rows = [
        {
            "prompt": f"what is {' and '.join(str(draw.randrange(100)) for _ in range(draw.randint(1, 12)))}?",
            "response": "it",
        }
        for _ in range(96)
    ]
    for name, content in (("data", rows), ("eval", rows[:24])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    for task in (
        BENCHMARKS / "small_device.py",
        BENCHMARKS / "hungry_task.py",
        Path(__file__).with_name("lost_task.py"),
    ):
        shutil.copy(task, folder)
    job: dict[str, Any] = {
        "name": "run",
        "task": "small_device:OnSmallDevice",
        "model": {"from_scratch": TINY_GPT2, "tokenizer": {"vocab_size": 300}},
        "data": {
            "path": "data.jsonl",
            "eval_path": "eval.jsonl",
            "max_length": 64,
            "cache_dir": "cache",
        },
        "train": {"global_batch_size": 32, "max_steps": 4},
        "resources": {"device": "cpu", "precision": "fp32"},
        "tracking": [],
    }
    for key, value in sections.items():
        job[key] = job[key] | value if isinstance(value, dict) and isinstance(job.get(key), dict) else value
    path = folder / "job.yaml"
    # One key a line, as people write it; the values are JSON, which is YAML.
    lines = [f"{key}: {json.dumps(value)}" for key, value in job.items() if key != "train"]
    lines += ["train:  # how", *(f"  {key}: {json.dumps(value)}" for key, value in job["train"].items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def everything_in(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

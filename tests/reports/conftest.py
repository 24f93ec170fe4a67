"""What the tests of reports share: the browser of `watch`'s tests, and one real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "watch"))

TRAINWRIGHT = str(Path(sys.executable).with_name("trainwright"))


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one CPU rank that `trainwright train` brought to its end."""
    folder = tmp_path_factory.mktemp("real")
    rows = [{"question": f"{number} and one?", "answer": f"{number + 1}."} for number in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dimensions = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    job = {
        "name": "tiny",
        "output_dir": str(folder / "outputs"),
        "model": {
            "from_scratch": {"architecture": "gpt2", "dimensions": dimensions},
            "tokenizer": {"vocab_size": 300},
        },
        "data": {"path": str(folder / "rows.jsonl"), "max_length": 32, "cache_dir": str(folder / "cache")},
        "train": {"global_batch_size": 4, "learning_rate": 1e-3, "max_steps": 8},
        "resources": {"device": "cpu", "precision": "fp32", "ranks": 1},
        "tracking": [],
        "claims": {"time per epoch": "about 40 min"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([TRAINWRIGHT, "train", folder / "job.yaml"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "outputs" / "tiny"

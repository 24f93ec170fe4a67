"""What `train` prints of its plan before a rank starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.job.loading import load_job
from trainwright.launch.train_run import plan_here, plan_lines
from trainwright.runs.folder import RunFolder


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    path = tmp_path / "job.yaml"
    path.write_text(f"name: a\nmodel: {{name: some/model}}\ndata: {{path: {tmp_path}/data.jsonl}}\n")
    return str(path)


def test_too_little_host_memory_is_said_before_the_start(job_file: str, tmp_path: Path) -> None:
    """S2-16: leave 2 GiB; the figure that is there and the one that was asked for are both named."""
    folder = RunFolder(tmp_path / "run")
    _, plan = plan_here(load_job(job_file, ["resources.host_memory_free_gib=1e6", "resources.device=cpu"]), None)
    warnings = [line for line in plan_lines(folder, plan) if line.startswith("warning: host memory")]
    assert len(warnings) == 1
    assert "resources.host_memory_free_gib=1e+06" in warnings[0]
    _, plan = plan_here(load_job(job_file, ["resources.host_memory_free_gib=0", "resources.device=cpu"]), None)
    assert not any(line.startswith("warning: host memory") for line in plan_lines(folder, plan))


def test_every_choice_is_printed_with_its_reason(job_file: str, tmp_path: Path) -> None:
    _, plan = plan_here(load_job(job_file, ["resources.device=cpu", "resources.ranks=2"]), None)
    lines = plan_lines(RunFolder(tmp_path / "run"), plan)
    for key, choice in plan.choices.items():
        assert f"  {key} = {choice.value}  ({choice.reason})" in lines
    assert plan.choices["train.micro_batch_size"].value * 2 * plan.layout.gradient_accumulation_steps == 32


def test_harm_14_a_dry_run_prints_a_command_that_runs(tmp_path: Path) -> None:
    """Pasted into a shell it prepares the data, opens an attempt and trains to the end."""
    rows = [{"prompt": f"{number} and one?", "response": f"{number + 1}."} for number in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dimensions = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    job = {
        "name": "dry",
        "output_dir": str(tmp_path / "out puts"),
        "model": {
            "from_scratch": {"architecture": "gpt2", "dimensions": dimensions},
            "tokenizer": {"vocab_size": 300},
        },
        "data": {"path": str(tmp_path / "rows.jsonl"), "max_length": 32, "cache_dir": str(tmp_path / "cache")},
        "train": {"global_batch_size": 4, "max_steps": 3},
        "resources": {"device": "cpu", "precision": "fp32", "ranks": 1},
        "tracking": [],
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "trainwright", "train", "job.yaml", "--dry-run"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (line,) = shown.splitlines()
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out puts" / "dry" / "final_model" / "model.safetensors").is_file()

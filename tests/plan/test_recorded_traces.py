"""Models without a closed form: `plan` traces them by itself, once; and without torch by what it was told elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainwright.errors import ExitCode, UserError
from trainwright.estimate.recorded_traces import read_traces

OLMO = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}
OLMO |= {"model_type": "olmo", "vocab_size": 2048}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
WITHOUT_TORCH = (
    "import runpy, sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'peft'));"
    "sys.argv[0] = 'trainwright'; runpy.run_module('trainwright', run_name='__main__', alter_sys=True)"
)


def job_for(folder: Path, config: dict[str, Any], method: str = "lora") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    job = folder / "job.yaml"
    job.write_text(
        f"name: traced\nmodel: {{name: {folder}}}\nmethod: {{type: {method}}}\n"
        "data: {path: rows.jsonl, max_length: 256}\ntrain: {global_batch_size: 8}\n"
    )
    return job


def plan(job: Path, data_dir: Path, *flags: str, torch: bool = True) -> subprocess.CompletedProcess[str]:
    program = ["-m", "trainwright"] if torch else ["-c", WITHOUT_TORCH]
    command = [sys.executable, *program, "plan", str(job), "--gpus", "h100:1", "--samples", "100", *flags]
    environment = os.environ | {"XDG_DATA_HOME": str(data_dir)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("traced")
    job = job_for(folder / "model", OLMO)
    return job, folder / "data", plan(job, folder / "data")


Traced = tuple[Path, Path, subprocess.CompletedProcess[str]]


def recording(traced: Traced) -> Path:
    [file] = (traced[1] / "trainwright" / "traces").iterdir()
    return file


def test_a_model_without_closed_form_is_traced_and_that_is_said(traced: Traced) -> None:
    _, _, done = traced
    assert done.returncode == 0, done.stderr
    assert "Tracing a step of this olmo model (single, micro-batch 8)" in done.stderr
    assert f"kept in {recording(traced)}" in done.stderr
    assert "single, 8 x 1: traced, " in done.stdout
    assert "Not estimated" not in done.stdout


def test_the_next_plan_needs_no_torch(traced: Traced) -> None:
    job, data_dir, first = traced
    again = plan(job, data_dir)
    assert again.stdout == first.stdout and again.stderr == ""
    changed = plan(job, data_dir, "train.micro_batch_size=2")
    assert "Tracing a step" in changed.stderr, "another micro-batch was never traced"


def test_without_torch_the_file_of_another_machine_serves(traced: Traced, tmp_path: Path) -> None:
    job, _, first = traced
    without = plan(job, tmp_path, torch=False)
    assert without.returncode == ExitCode.MISSING
    assert "install torch and transformers here" in without.stderr
    handed_over = plan(job, tmp_path, "--recording", str(recording(traced)), torch=False)
    assert handed_over.returncode == 0, handed_over.stderr
    assert handed_over.stdout == first.stdout
    other = plan(job, tmp_path, "train.micro_batch_size=4", "--recording", str(recording(traced)), torch=False)
    assert "has no step of this layout" in other.stdout


def test_no_trace_leaves_it_at_the_least(traced: Traced, tmp_path: Path) -> None:
    done = plan(traced[0], tmp_path, "--no-trace")
    assert done.returncode == 0 and "Tracing" not in done.stderr
    assert done.stdout.startswith("Not estimated: ")
    both = plan(traced[0], tmp_path, "--no-trace", "--recording", str(recording(traced)))
    assert both.returncode == ExitCode.USAGE and "leave one of them out" in both.stderr


def test_all_weights_of_a_mixture_of_experts_are_traced(tmp_path: Path) -> None:
    """Its products in fp32 were refused by torch's meta kernel."""
    job = job_for(tmp_path / "model", OLMO | EXPERTS | {"model_type": "olmoe"}, "full")
    done = plan(job, tmp_path / "data")
    assert done.returncode == 0, done.stderr
    assert "traced, " in done.stdout and "not traced" not in done.stdout


def test_a_recording_of_another_model_is_refused(traced: Traced, tmp_path: Path) -> None:
    job = job_for(tmp_path / "model", OLMO | {"num_hidden_layers": 8})
    done = plan(job, tmp_path / "data", "--recording", str(recording(traced)), torch=False)
    assert done.returncode == ExitCode.MISSING
    assert "was recorded of another model than the job's" in done.stderr


DAMAGE: dict[str, tuple[Any, str]] = {
    "schema_version": (7, "schema_version: must be 1"),
    "config": ("olmo2", "config, auto_class: must say what model it is of"),
    "versions": ({"torch": 2.13}, "versions: must be those of the libraries, by name"),
    "shapes": ({"parameters": {"a": [-1]}, "linear": []}, "shapes.parameters: must be the dimensions of each"),
    "steps": ({"a": {"peak": {"parts_bytes": {"weights": -5}}}}, "steps.a: peak.parts_bytes: must be bytes by part"),
}


@pytest.mark.parametrize("key", DAMAGE)
def test_a_damaged_recording_is_refused_with_what_is_wrong(key: str, traced: Traced, tmp_path: Path) -> None:
    value, problem = DAMAGE[key]
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(json.loads(recording(traced).read_text()) | {key: value}))
    with pytest.raises(UserError) as caught:
        read_traces(damaged)
    assert any(found.startswith(problem) for found in caught.value.problems)


def test_a_recording_whose_parts_do_not_add_up_is_refused(traced: Traced, tmp_path: Path) -> None:
    data = json.loads(recording(traced).read_text())
    next(iter(data["steps"].values()))["peak"]["reserved_bytes"] //= 2
    (tmp_path / "less.json").write_text(json.dumps(data))
    with pytest.raises(UserError) as caught:
        read_traces(tmp_path / "less.json")
    assert any("must add up to what is reserved" in found for found in caught.value.problems)


def test_no_file_and_no_json_are_refused_in_plain_words(traced: Traced, tmp_path: Path) -> None:
    (tmp_path / "no.json").write_bytes(b"\x80\x04 pickle")
    for file in (tmp_path / "no.json", tmp_path / "nothing.json"):
        done = plan(traced[0], tmp_path, "--recording", str(file))
        assert done.returncode == ExitCode.USAGE and "cannot be read as a recording of traces" in done.stderr
        assert "Traceback" not in done.stderr

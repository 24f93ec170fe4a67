"""`trainwright plan` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.errors import ExitCode

PRESET = ("preset:paper_r64", "model.name=Qwen/Qwen2.5-7B-Instruct")


def plan(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainwright", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_plan_prints_layout_figures_reasons_and_claims() -> None:
    done = plan(*PRESET, "--gpus", "a100-80gb:4", "--samples", "2500")
    assert done.returncode == ExitCode.DONE, done.stderr
    for words in ("Plan for paper_r64", "Estimate", "memory of each GPU", "host memory", "step ", "run ", "Why"):
        assert words in done.stdout
    assert "Claimed by the guide, not measured here" in done.stdout
    assert "On other GPUs, best first" in done.stdout


def test_json_is_the_same_bytes_each_time_and_needs_no_torch(tmp_path: Path) -> None:
    arguments = (*PRESET, "--gpus", "a100-80gb:2,v100-32gb:2", "--json")
    first, second = plan(*arguments), plan(*arguments)
    assert first.stdout == second.stdout
    document = json.loads(first.stdout)
    assert document["schema_version"] == 2
    assert document["estimate"]["memory_kind"] == document["estimate"]["time_kind"] == "estimate"
    memory = document["estimate"]["memory"]
    assert sum(memory["parts_bytes"].values()) == memory["allocated_bytes"]
    assert memory["reserved_bytes"] + sum(memory["outside_bytes"].values()) == memory["device_bytes"]
    script = (
        "import sys\nfrom trainwright.cli import main\n"
        f"sys.argv = ['trainwright', 'plan', *{list(arguments)!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_an_inventory_from_another_machine(tmp_path: Path) -> None:
    """What `gpus --json` printed there is planned for here, and gives the plan of the same GPUs written down."""
    listed = subprocess.run(
        [sys.executable, "-m", "trainwright", "gpus", "--gpus", "a100-80gb:2,host=64gib", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    file = tmp_path / "node.json"
    file.write_text(listed.stdout)
    from_file, written = (
        plan(*PRESET, "--json", *rest) for rest in (("--inventory", str(file)), ("--gpus", "a100-80gb:2,host=64gib"))
    )
    assert from_file.returncode == ExitCode.DONE, from_file.stderr
    assert json.loads(from_file.stdout) == json.loads(written.stdout)
    line = tmp_path / "node.txt"
    line.write_text("h100:8x2\n")
    assert "16 x NVIDIA H100" in plan(*PRESET, "--inventory", str(line)).stdout


@pytest.mark.parametrize(
    "content", ["{}", '{"devices": []}', '{"devices": [{"kind": "tpu"}], "host": {}}', "{", "nothing:here:at:all"]
)
def test_an_inventory_that_cannot_be_read_says_so(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    done = plan(*PRESET, "--inventory", str(file))
    assert done.returncode == ExitCode.USAGE
    assert "Traceback" not in done.stderr and "inventory" in done.stderr


def test_nothing_fits_is_exit_3_with_three_ways_out() -> None:
    done = plan(*PRESET, "method.type=full", "train.micro_batch_size=auto", "--gpus", "rtx-3090:1,host=64gib")
    assert done.returncode == ExitCode.NO_PLAN_FITS
    assert done.stderr.count("this would fit:") == 3


def test_contradicting_flags_and_unknown_goals() -> None:
    both = plan(*PRESET, "--gpus", "h100", "--inventory", "x.json")
    assert both.returncode == ExitCode.USAGE and "leave one of them out" in both.stderr
    goal = plan(*PRESET, "--gpus", "h100", "--goal", "prettiest")
    assert goal.returncode == ExitCode.USAGE and "cheapest" in goal.stderr


def test_samples_are_counted_in_the_data(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 130)
    done = plan(*PRESET, "data.path=d.jsonl", "--gpus", "a100-80gb:1", cwd=tmp_path)
    assert "steps per epoch     3 (130 samples / 64, the last one smaller)" in done.stdout


def test_the_files_are_written_where_asked(tmp_path: Path) -> None:
    done = plan(*PRESET, "--gpus", "a100-80gb:2", "--write", str(tmp_path / "files"))
    assert done.returncode == ExitCode.DONE, done.stderr
    assert {"launch.sh", "plan.json", "accelerate_config_single_node.yaml"} <= {
        path.name for path in (tmp_path / "files").iterdir()
    }

"""`trainwright presets`: the list, one preset, and both as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from trainwright.cli.presets import presets
from trainwright.errors import UserError
from trainwright.job.loading import load_job
from trainwright.job.preset import GUIDES


def invoke(*arguments: str) -> Result:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(presets)
    return CliRunner().invoke(app, list(arguments))


def test_the_list_has_a_line_for_each() -> None:
    result = invoke()
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(GUIDES)
    assert all(len(line) < 130 and "guide)" in line for line in lines)
    assert "preset:NAME" in result.stderr


@pytest.mark.parametrize("name", GUIDES)
def test_a_printed_preset_is_a_job_file(name: str, tmp_path: Path) -> None:
    """What goes to stdout can be saved and run."""
    file = tmp_path / "job.yaml"
    file.write_text(invoke(name).stdout)
    assert load_job(str(file)).job == load_job(f"preset:{name}").job


def test_a_preset_prints_its_arithmetic_and_claims_on_stderr() -> None:
    """S1-06, S2-26, U-11: own figures, thousands separated; the guide's are called claims."""
    shown = invoke("chatlm-fast-16").stderr
    assert "effective batch: 64 = 16 x 2 x 2" in shown
    assert "steps per epoch: 78 on the guide's 5,000 samples" in shown
    assert "claimed by the guide, not measured here: time per epoch: about 20 min" in shown
    assert "steps per epoch: 3,687 on the guide's 29,500 samples" in invoke("multi-gpu-base").stderr
    assert "steps per epoch" not in invoke("framer-lora-2gpu").stderr


def test_a_preset_of_a_later_task_says_so() -> None:
    assert "`framer-lora` comes in a later version" in invoke("framer-lora-3gpu").stderr
    assert "later version" not in invoke("paper_r64").stderr


def test_json() -> None:
    everything = json.loads(invoke("--json").stdout)
    assert everything["schema_version"] == 1
    assert [entry["name"] for entry in everything["presets"]] == list(GUIDES)
    one = json.loads(invoke("framer-lora-3gpu", "--json").stdout)
    assert one["schema_version"] == 1
    assert one["runs_in_this_version"] is False
    assert one["guide"]["effective_batch"] == 9
    assert one["guide"]["steps_per_epoch"] is None
    assert one["yaml"].startswith("# FramerTurbo")


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    error = invoke("chatlm-fast16").exception
    assert isinstance(error, UserError)
    assert error.hints[0] == "did you mean `chatlm-fast-16`?"

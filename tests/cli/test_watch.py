"""`trainwright watch` without a run, and what it says of runs that are not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "standins" / "nvml"))

import nvml_standin as machines
from nvml_standin import NvmlStandin

from trainwright.cli import app
from trainwright.errors import UserError


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> NvmlStandin:
    return NvmlStandin.build(tmp_path_factory.mktemp("nvml"))


def machine(nvml: NvmlStandin, text: str, *arguments: str) -> str:
    done = nvml.python(text, "-m", "trainwright", "watch", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(output: str, title: str) -> list[str]:
    lines = output.splitlines()
    begin = lines.index(title) + 2
    end = next((place for place in range(begin, len(lines)) if not lines[place].startswith("  ")), len(lines))
    return lines[begin:end]


def test_a_throttled_mixed_node_and_its_alerts(nvml: NvmlStandin) -> None:
    """Done-when 4 of issue 7: views, alerts and JSON."""
    output = machine(nvml, machines.TWO_A100_TWO_V100_AT_WORK, "--once")
    gpus = rows(output, "GPUs")
    assert [line.split()[0] for line in gpus] == ["0", "1", "2", "3"]
    assert "30.3/40.0 GiB  76 %" in gpus[0] and "97 %" in gpus[0] and "310/400 W" in gpus[0]
    assert "705/1410 MHz" in gpus[1] and "hw_thermal_slowdown" in gpus[1]
    assert "n/a" in gpus[2], "no counters of NVLink"
    assert not any("n/a" in line for line in (gpus[0], gpus[1], gpus[3]))
    alerts = "\n".join(rows(output, "Alerts"))
    assert "GPU 1 is at 91 °C" in alerts and "GPU 1 runs slower than it can" in alerts
    assert "GPU 1 has 95 % of its memory in use" in alerts
    assert "GPU 0" not in alerts and "GPU 2" not in alerts and "GPU 3" not in alerts
    document: dict[str, Any] = json.loads(machine(nvml, machines.TWO_A100_TWO_V100_AT_WORK, "--json"))
    assert document["schema_version"] == 1 and document["run"] is None
    assert [gpu["power_w"] for gpu in document["nodes"][0]["gpus"]] == [310, 395, 120, 250]
    assert {alert["rule"] for alert in document["alerts"]} == {"gpu_temperature", "gpu_throttled", "gpu_memory_high"}


def test_a_lost_gpu(nvml: NvmlStandin) -> None:
    output = machine(nvml, machines.GPU_1_LOST, "--once")
    gpus = rows(output, "GPUs")
    assert gpus[1].split()[:2] == ["1", "LOST"] and set(gpus[1].split()[2:]) == {"n/a"}
    assert "GPU 1 is lost: it no longer answers" in output
    document = json.loads(machine(nvml, machines.GPU_1_LOST, "--json"))
    assert [gpu["lost"] for gpu in document["nodes"][0]["gpus"]] == [False, True, False]
    assert document["nodes"][0]["gpus"][1]["temperature_c"] is None


def test_mig(nvml: NvmlStandin) -> None:
    output = machine(nvml, machines.MIG, "--once")
    assert "0.0/19.5 GiB" in rows(output, "MIG instances")[0]
    assert "Alerts" not in output


def test_missing_readings_are_not_available(nvml: NvmlStandin) -> None:
    (line,) = rows(machine(nvml, machines.NO_LOAD_READABLE, "--once"), "GPUs")
    assert line.split()[:4] == ["0", "GeForce", "RTX", "3090"] and set(line.split()[4:]) == {"n/a"}


def refused(folder: Path, *arguments: str) -> UserError:
    result = CliRunner().invoke(app, ["watch", *arguments, "--output-dir", str(folder)])
    assert isinstance(result.exception, UserError), result
    return result.exception


def test_a_run_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    for name in ("chatlm-small", "chatlm-fast-8", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    error = refused(tmp_path, "chatlm-smal")
    assert error.exit_code == 4 and "`chatlm-smal`" in error.message
    assert error.hints[0].startswith(f"did you mean `{tmp_path}/chatlm-small`")
    assert "chatlm-fast-8, chatlm-small, other" in error.hints[-1]
    (tmp_path / "empty").mkdir()
    assert "no run.json" in refused(tmp_path, "empty").message or "no such folder" in refused(tmp_path, "empty").message
    assert "there is no run in" in refused(tmp_path / "empty", "x").hints[-1]

"""`trainwright gpus` as a user runs it, on machines that a stand-in NVML shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "standins" / "nvml"))

import nvml_standin as machines
from nvml_standin import NvmlStandin

PROGRAM = """
import sys, typer
from trainwright.cli.gpus import gpus
from trainwright.errors import UserError
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(gpus)
try:
    app()
except UserError as error:
    print(error.render(), file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> NvmlStandin:
    return NvmlStandin.build(tmp_path_factory.mktemp("nvml"))


def test_a_mixed_node(nvml: NvmlStandin) -> None:
    """S0-25, S0-26, S0-28, S0-29, and precision of each GPU (S4-18)."""
    done = nvml.python(machines.TWO_A100_TWO_V100, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    table = lines[1:5]
    assert [line.split()[0] for line in table] == ["0", "1", "2", "3"]
    assert ["bf16" in line for line in table] == [True, True, False, False]
    assert "gen 3, 12 links to 1" in table[0]
    assert "pid 4000001: 29.8 GiB" in table[0]
    block = lines.index("GPU Info")
    assert lines[block - 1] == lines[block + 1] == "=" * 40
    assert lines[block + 2] == "index, name, memory.total, memory.free"
    assert lines[block + 5] == "2, Tesla V100-SXM2-32GB, 32768 MiB, 16768 MiB"
    assert "⚠️  WARNING: Mixed GPU types detected!" in lines
    assert "│ 3     │ Tesla V100-SXM2-32GB  │ 32768 MiB    │" in lines


def test_part_of_a_mixed_node_is_not_mixed(nvml: NvmlStandin) -> None:
    done = nvml.python(machines.TWO_A100_TWO_V100, "-c", PROGRAM, "--gpus", "0,1")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["0", "1"]
    assert "Mixed GPU types" not in done.stdout
    assert "V100" not in done.stdout


def test_hidden_gpus_are_listed_and_do_not_count_as_mixed(nvml: NvmlStandin) -> None:
    done = nvml.python(machines.TWO_A100_TWO_V100, "-c", PROGRAM, CUDA_VISIBLE_DEVICES="0,1")
    assert [line.split()[1] for line in done.stdout.splitlines()[1:5]] == ["0", "1", "hidden", "hidden"]
    assert "Mixed GPU types" not in done.stdout


def test_json_is_one_document_with_nulls(nvml: NvmlStandin) -> None:
    done = nvml.python(machines.NOTHING_READABLE, "-c", PROGRAM, "--json")
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    [device] = document["devices"]
    assert device["memory_total_bytes"] is None
    assert device["precision"]["value"] == "bf16"
    assert "GA102 GPU architecture whitepaper" in device["catalog"]["bf16_tflops"]["source"]
    assert document["host"]["memory_total_bytes"] > 0


def test_gpus_that_are_not_there_are_written_down(nvml: NvmlStandin) -> None:
    done = nvml.python(None, "-c", PROGRAM, "--gpus", "a100-80gb:2,v100-32gb:2", "--json")
    document = json.loads(done.stdout)
    assert [device["catalog_key"] for device in document["devices"]] == ["a100-80gb"] * 2 + ["v100-32gb"] * 2
    assert document["devices"][0]["memory_free_bytes"] is None


def test_a_lost_gpu_is_said(nvml: NvmlStandin) -> None:
    assert "note: GPU 1 is lost" in nvml.python(machines.GPU_1_LOST, "-c", PROGRAM).stdout


def test_a_machine_without_gpus_shows_its_cpu(nvml: NvmlStandin) -> None:
    done = nvml.python(None, "-c", PROGRAM)
    assert done.returncode == 0
    assert "note: the NVIDIA driver is not loaded" in done.stdout
    assert "GPU Info" not in done.stdout


def test_a_choice_that_cannot_be_had_exits_with_4(nvml: NvmlStandin) -> None:
    done = nvml.python(machines.FOUR_A100, "-c", PROGRAM, "--gpus", "7")
    assert (done.returncode, done.stdout) == (4, "")
    assert "hint: there are: 0 (NVIDIA A100-SXM4-80GB)" in done.stderr


def test_no_heavy_library_is_loaded(nvml: NvmlStandin) -> None:
    program = (
        PROGRAM.replace("    app()", "    app(standalone_mode=False)") + "\nprint([*sys.modules], file=sys.stderr)"
    )
    modules = nvml.python(machines.FOUR_A100, "-c", program).stderr
    assert "trainwright.hardware.nvml" in modules
    assert not {"'torch'", "'numpy'", "'transformers'"} & set(modules.strip("[]\n").split(", "))

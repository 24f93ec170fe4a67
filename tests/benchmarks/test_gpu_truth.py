"""The benchmark that needs a GPU, without one (issue 3, "GPU truth"): all of it on the CPU with tiny models."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from trainwright.anatomy import anatomy, read_config
from trainwright.estimate.closed import replayed
from trainwright.estimate.request import Request
from trainwright.job.schema import Job

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu"
RESULTS = BENCHMARK.parent / "results"
GIB = 1 << 30
H100 = {"device": "cuda", "compute_capability": (9, 0)}


def run(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the benchmark as a user does."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARK), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


def listed() -> list[Any]:
    """Return what is measured on a GPU."""
    spec = importlib.util.spec_from_file_location("gpu_truth_configurations", BENCHMARK / "configurations.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return list(module.ON_GPU)


def test_one_command_predicts_measures_and_compares(tmp_path: Path) -> None:
    """On one rank and on two; the model that is measured is the one that was predicted, and predictions stay."""
    predictions, out = tmp_path / "predictions.json", tmp_path / "measured.json"
    files = ("--device", "cpu", "--predictions", predictions, "--out", out)
    compared = json.loads(run(*files, "--only", "ckpt|fsdp2", "--limit", 200, "--json").stdout)

    predicted = json.loads(predictions.read_text())["rows"]
    results = json.loads(out.read_text())
    names = ["tiny-llama full b2 s64 ckpt", "tiny-llama lora r16 b2 s64 fsdp2 2 ranks"]
    for rows in (predicted, results["rows"], compared["rows"]):
        assert [row["name"] for row in rows] == names
    for before, measured in zip(predicted, results["rows"], strict=True):
        assert measured["parameters"] == before["traced"]["parameters"]["total"]
        assert measured["trainable"] == before["traced"]["parameters"]["trainable"]
        assert before["traced"]["allocated_bytes"] > before["traced"]["static_bytes"] > 0
        assert before["closed"]["allocated_bytes"] > 0
        assert measured["steps"] == 4
        assert 0 < measured["step_s_median"] < measured["wall_s"]
        assert 0.1 * GIB < measured["resident_bytes"] < 8 * GIB
    assert len(results["rows"][1]["by_rank"]) == 2
    assert results["not_reached"] == [] and compared["not_compared"] == {}
    assert results["predictions_sha256"] == hashlib.sha256(predictions.read_bytes()).hexdigest()
    assert all(rate > 0 for rate in results["constants"]["matmul_tflops"].values())

    again = run(*files, "--predict", check=False)
    assert again.returncode == 2 and "what was predicted stays" in again.stderr
    assert results["predictions_sha256"] == hashlib.sha256(predictions.read_bytes()).hexdigest()


def test_it_stops_when_its_budget_is_spent(tmp_path: Path) -> None:
    """In the middle of what is under way; what was not reached is named, and all is on disk."""
    out = tmp_path / "measured.json"
    run("--device", "cpu", "--measure", "--predictions", tmp_path / "none.json", "--out", out, "--budget", 4)
    results = json.loads(out.read_text())
    assert results["elapsed_s"] < 4 + 4
    measured = [row["name"] for row in results["rows"]]
    assert results["not_reached"]
    assert len(measured) + len(results["not_reached"]) == 5
    assert results["predictions_sha256"] is None


def predicted_row(name: str, traced: dict[str, Any], **more: Any) -> dict[str, Any]:
    places = {"method": "full", "strategy": "single", "ranks": 1, "checkpointing": False}
    return {"name": name, **places, "traced": traced, "closed": {"error": "has none"}, "time": None, **more}


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    """Predictions and measurements whose errors can be worked out in the head."""
    device = {"device_bytes": None, "out_of_memory": False}
    predicted = [
        predicted_row("a", {"allocated_bytes": 101, "reserved_bytes": 220, **device}, time={"step_s": 1.1}),
        predicted_row("b", {"allocated_bytes": 90, "reserved_bytes": 200, **device}),
        predicted_row("c", {"allocated_bytes": 97, "reserved_bytes": 200, **device}, method="lora"),
        predicted_row("d", {"allocated_bytes": 300, "reserved_bytes": 400, **device, "out_of_memory": True}),
        predicted_row("e", {"error": "cannot be traced"}),
        predicted_row("f", {"allocated_bytes": 300, "reserved_bytes": 400, **device}),
        predicted_row("g", {"allocated_bytes": 300, "reserved_bytes": 400, **device}),
        predicted_row("j", {"allocated_bytes": 100, "reserved_bytes": 200, **device, "parameters": {"total": 8}}),
    ]
    figures = {
        "parameters": 7,
        "allocated_bytes": 100,
        "reserved_bytes": 200,
        "device_bytes": 250,
        "step_s_median": 1.0,
    }
    measured = [
        *({"name": name, **figures} for name in ("a", "b", "c", "e")),
        {"name": "d", "failed": "out of memory"},
        {"name": "f", "failed": "out of memory"},
        {"name": "h", **figures},
        {"name": "j", **figures},
        {"name": "g", "skipped": "peft is not installed"},
    ]
    results = {"constants": {"versions": {"torch": "2.11.0"}}, "rows": measured, "not_reached": ["i"]}
    files = (tmp_path / "predictions.json", tmp_path / "measured.json")
    for file, content in zip(files, ({"versions": {"torch": "2.13.0"}, "rows": predicted}, results), strict=True):
        file.write_text(json.dumps(content))
    return files


def test_errors_are_those_of_the_predictions(made: tuple[Path, Path]) -> None:
    """By slice: +1, -10 and -3 % of allocated memory, one of the three too low by over 5 %."""
    files = ("--compare", "--predictions", made[0], "--out", made[1])
    compared = json.loads(run(*files, "--json").stdout)
    by_place = {(s["slice"], s["way"], s["figure"]): s for s in compared["slices"]}
    allocated = by_place["all", "traced", "allocated_bytes"]
    assert allocated["rows"] == 3
    assert allocated["median_abs_pct"] == pytest.approx(3)
    assert allocated["p95_abs_pct"] == allocated["max_abs_pct"] == pytest.approx(10)
    assert allocated["under_5_pct_share"] == pytest.approx(1 / 3)
    assert by_place["full", "traced", "allocated_bytes"]["median_abs_pct"] == pytest.approx(5.5)
    assert by_place["lora", "traced", "reserved_bytes"]["max_abs_pct"] == 0
    assert by_place["all", "time", "step_s"]["median_abs_pct"] == pytest.approx(10)
    assert not [place for place in by_place if place[1] == "closed" or place[2] == "device_bytes"]
    traced, closed = compared["oom"]
    assert (traced["rows"], traced["right"], traced["out_of_memory"], traced["out_of_memory_right"]) == (5, 4, 2, 1)
    assert closed["rows"] == 0
    assert compared["not_compared"] == {
        "g": "peft is not installed",
        "h": "was not predicted",
        "i": "not reached within the budget",
        "j": "is not the model that was predicted",
    }
    lines = run(*files).stdout.splitlines()
    assert lines[0] == "predicted with torch 2.13.0" and lines[1] == "measured with  torch 2.11.0"
    assert next(line for line in lines if line.startswith("b ")).count("-10.00%") == 1
    assert next(line for line in lines if line.startswith("d ")).endswith(
        "out of memory (said so? traced: True, closed: None)"
    )


def test_what_is_measured_on_a_gpu_covers_what_was_asked_for() -> None:
    """40 or more: models of 0.1 to 8 B, every method, both ends of length and micro-batch, ranks that share a GPU."""
    configurations = listed()
    assert len({configuration.name for configuration in configurations}) == len(configurations) >= 40
    for configuration in configurations:
        request = Request.parse(configuration.request())
        job = Job.model_validate(configuration.job(5, None))
        assert request.method.type == job.method.type
        assert request.optimizer == job.train.optim
        assert request.gradient_accumulation_steps * request.micro_batch_size * request.world_size == (
            job.train.global_batch_size
        )

    def values(field: str) -> set[Any]:
        return {getattr(configuration, field) for configuration in configurations}

    assert values("method") == {"full", "lora", "qlora"}
    assert values("optimizer") == {"adamw", "adamw_8bit", "adafactor"}
    assert values("strategy") == {"single", "ddp", "fsdp2"}
    assert values("checkpointing") == {True, False}
    assert (min(values("length")), max(values("length"))) == (512, 8192)
    assert (min(values("micro_batch")), max(values("micro_batch"))) == (1, 32)


def test_what_was_predicted_for_an_h100_is_what_was_measured() -> None:
    """22 steps predicted, then measured, each in a process of its own: no memory off by 1 %, the middle by 0.1 %."""
    measured = RESULTS / "gpu_truth_h100.json"
    predictions = RESULTS / "gpu_truth_predictions_h100.json"
    compared = json.loads(run("--gpu", "h100", "--compare", "--json").stdout)
    assert (
        json.loads(measured.read_text())["predictions_sha256"] == hashlib.sha256(predictions.read_bytes()).hexdigest()
    )
    errors = {(s["way"], s["figure"]): s for s in compared["slices"] if s["slice"] == "all"}
    for figure in ("allocated_bytes", "reserved_bytes", "device_bytes"):
        assert errors["traced", figure]["rows"] >= 20
        assert errors["traced", figure]["median_abs_pct"] < 0.1
        assert errors["traced", figure]["max_abs_pct"] < 1
    assert errors["closed", "allocated_bytes"]["median_abs_pct"] < 0.1


def test_the_time_of_today_is_that_of_an_h100() -> None:
    """Nothing was taken from these rows: what hosts need for a launch is from those of the H200."""
    compared = json.loads(run("--gpu", "h100", "--compare", "--json").stdout)
    time = next(s for s in compared["slices"] if s["slice"] == "all" and s["way"] == "time_today")
    assert time["rows"] >= 20 and time["median_abs_pct"] < 10
    assert sum(compared["in_range_today"]) >= 0.8 * time["rows"]


def test_the_closed_form_says_what_an_h100_measured() -> None:
    """All that the GPU measured, without torch; but T5 and packed documents, whose masks are not those of 5.17 now."""
    rows = {row["name"]: row for row in json.loads((RESULTS / "gpu_truth_h100.json").read_text())["rows"]}
    found = {
        chosen.name: replayed(anatomy(read_config(chosen.config)), Request.parse(chosen.request(**H100)))
        for chosen in listed()
        if chosen.name in rows and chosen.config["model_type"] != "t5" and "packed" not in chosen.name
    }
    assert len(found) >= 20
    for figure, most_pct in (("allocated_bytes", 0.5), ("reserved_bytes", 2.5)):
        off_pct = [abs(100 * getattr(memory, figure) / rows[name][figure] - 100) for name, memory in found.items()]
        assert median(off_pct) < 0.1 and max(off_pct) < most_pct, (figure, dict(zip(found, off_pct, strict=True)))


def test_the_predictor_still_says_what_an_h100_measured(tmp_path: Path) -> None:
    """With whatever torch and transformers are here; those of the measurement were 2.11 and 5.17."""
    names = [
        "gpt2-medium full b16 s1024",
        "pythia-410m full b8 s2048",
        "Llama-3.2-1B qlora r16 b4 s2048 ckpt",
        "Qwen2.5-0.5B full b4 s2048 adamw_8bit",
        "Qwen2.5-0.5B full b4 s2048 adafactor",
    ]
    measured = {row["name"]: row for row in json.loads((RESULTS / "gpu_truth_h100.json").read_text())["rows"]}
    again = tmp_path / "predictions.json"
    chosen = "|".join(f"^{re.escape(name)}$" for name in names)
    run("--gpu", "h100", "--predict", "--predictions", again, "--only", chosen)
    predicted = {row["name"]: row for row in json.loads(again.read_text())["rows"]}
    assert sorted(predicted) == sorted(names)
    for name in names:
        for way in ("traced", "closed"):
            for figure in ("allocated_bytes", "reserved_bytes", "device_bytes"):
                assert predicted[name][way][figure] == pytest.approx(measured[name][figure], rel=0.01), (name, figure)

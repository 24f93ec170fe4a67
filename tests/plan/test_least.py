"""Models that are not described: no layout is a plan unless what it must hold at least is known to fit."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
from planning import planned, told

from trainwright.anatomy import anatomy, read_config
from trainwright.anatomy.catalog import find
from trainwright.anatomy.weight_shapes import shapes_of_anatomy
from trainwright.errors import ExitCode, UserError
from trainwright.estimate.closed import memory
from trainwright.estimate.least import least_bytes
from trainwright.estimate.request import Method, Request
from trainwright.hardware.inventory import parse_inventory
from trainwright.hardware.reading import GIB
from trainwright.job.loading import load_job
from trainwright.launch.planning import PlanFlags, plan_job
from trainwright.launch.train_run import plan_lines
from trainwright.plan import job_model as models
from trainwright.plan.choose import Plan, choose
from trainwright.runs.folder import RunFolder

PRESET = "preset:paper_r64"
SCOUT = {"model_type": "llama4", "text_config": {"num_hidden_layers": 48, "num_local_experts": 16}}
"""Llama-4-Scout: 108 billion parameters."""
OLMO = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
OLMO |= {"model_type": "olmo", "vocab_size": 4096}


def folder_of(parent: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]] | None = None) -> str:
    """Write a model's folder; of its weights the header alone."""
    parent.mkdir(exist_ok=True)
    (parent / "config.json").write_text(json.dumps(config))
    if shapes is not None:
        header = json.dumps({n: {"dtype": "BF16", "shape": s, "data_offsets": [0, 0]} for n, s in shapes.items()})
        (parent / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    return f"model.name={parent}"


def refusal(gpus: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        planned(PRESET, gpus, *overrides)
    return caught.value


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "torch_is_there", lambda: False)


def test_harm_03_a_mistyped_name_is_refused_with_what_was_meant() -> None:
    error = refusal("h100:8", "model.name=meta-llama/Llama-3.1-8B-Instrukt")
    assert error.exit_code is ExitCode.MISSING
    assert "did you mean meta-llama/Llama-3.1-8B-Instruct" in error.render()
    assert "hf download meta-llama/Llama-3.1-8B-Instrukt config.json" in error.render()


@pytest.mark.parametrize("name", ["/nowhere/final_model", "outputs/run/final_model"])
def test_harm_03_a_folder_that_is_missing_blames_no_network(name: str) -> None:
    error = refusal("h100:1", f"model.name={name}")
    assert error.exit_code is ExitCode.MISSING and f"there is no folder {name}" in error.message
    assert "network" not in error.render() and "hub" not in error.render()


def test_harm_03_a_diffusers_model_is_refused_as_what_it_is(tmp_path: Path) -> None:
    error = refusal("h100:1", folder_of(tmp_path, {"_class_name": "UNet2DConditionModel"}))
    assert error.exit_code is ExitCode.MISSING
    assert "diffusers model, UNet2DConditionModel" in error.message and "None" not in error.render()


@pytest.mark.parametrize(
    ("gpus", "overrides", "code"),
    [
        ("m3:1", ("model.name=meta-llama/Meta-Llama-3-70B", "method.type=full"), ExitCode.NO_PLAN_FITS),
        ("m3-24gb:1", ("model.name=Qwen/Qwen2.5-3B", "method.type=full"), ExitCode.NO_PLAN_FITS),
        ("m3:1", ("model.name=Qwen/Qwen2.5-3B",), ExitCode.MISSING),
    ],
)
def test_harm_03_an_apple_gpu_is_no_plan_for_what_its_memory_cannot_hold(
    gpus: str, overrides: tuple[str, ...], code: ExitCode
) -> None:
    """An M3 has 24 GiB at most; where it may have enough, the answer says how to name its size."""
    error = refusal(gpus, *overrides)
    assert error.exit_code is code
    assert ("m3-24gb" in error.render()) == (code is ExitCode.MISSING)


def test_harm_03_what_fits_off_cuda_says_first_what_is_not_known() -> None:
    text = told(PRESET, "m3-24gb:1", "model.name=Qwen/Qwen2.5-3B")
    first = text.splitlines()[0]
    assert first.startswith("Not estimated: activations and time") and "GiB available" in first
    assert "Plan for paper_r64: 1 x Apple M3" in text


def test_harm_03_a_model_that_transformers_builds_is_counted_and_held_to_the_gpus(tmp_path: Path) -> None:
    """One process with torch counts it; full weights of 108 billion parameters are no plan for 640 GiB."""
    scout = folder_of(tmp_path, SCOUT)
    error = refusal("h100:8,host=256gib", scout, "method.type=full")
    assert error.exit_code is ExitCode.NO_PLAN_FITS
    assert any("method.type=lora" in hint for hint in error.hints)
    lora = planned(PRESET, "h100:8", scout)
    assert lora.layout.strategy == "fsdp2" and lora.least is not None
    assert 2 * 107.7e9 / 8 / GIB < lora.least.parts_bytes["weights"] / GIB < 2 * 108e9 / 8 + 1
    # The experts are stacked and stay in 16 bits, so 4 bits do not put the whole model on one GPU.
    assert planned(PRESET, "h100:8", scout, "method.type=qlora").layout.strategy == "fsdp2"


def test_harm_03_a_trace_is_taken_of_a_model_that_is_not_described(tmp_path: Path) -> None:
    loaded = load_job(PRESET, [folder_of(tmp_path, OLMO)])
    job, plan, _ = plan_job(loaded, PlanFlags(gpus="rtx-4090:1", trace=True))
    assert plan.estimate is not None and plan.not_known is None
    assert any("traced," in line for line in plan.traces)
    assert plan.estimate.memory.parts_bytes["weights"] > 0 and plan.estimate.time is None
    assert job.train.global_batch_size == 64


LAYER = {"model.layers.0.mlp.up_proj.weight": (40_000, 20_000), "model.embed_tokens.weight": (100_000, 20_000)}


@pytest.mark.usefixtures("without_torch")
def test_harm_03_without_torch_headers_tell_the_size(tmp_path: Path) -> None:
    """2.8 billion parameters: 44.8 GB with AdamW, which four cards of 24 GB share."""
    unknown = folder_of(tmp_path, {"model_type": "nobodys"}, LAYER)
    full = planned(PRESET, "rtx-3090:4", unknown, "method.type=full", "train.global_batch_size=32")
    count = sum(map(prod, LAYER.values()))
    assert full.least is not None and full.layout.strategy == "fsdp2"
    assert full.least.total_bytes == pytest.approx(16 * count / 4, rel=0.01)
    packed = planned(PRESET, "rtx-3090:1", unknown, "method.type=qlora", "method.targets=all-linear")
    assert packed.least is not None
    assert packed.least.parts_bytes["weights"] == pytest.approx(2 * 2e9 + 0.516 * 0.8e9, rel=0.01)
    assert packed.least.parts_bytes["adapters"] == 4 * 64 * (40_000 + 20_000)


@pytest.mark.usefixtures("without_torch")
def test_harm_03_an_index_tells_the_size_but_not_what_is_packed(tmp_path: Path) -> None:
    unknown = folder_of(tmp_path, {"model_type": "nobodys", "torch_dtype": "bfloat16"})
    index = {"metadata": {"total_size": 140 * 10**9}, "weight_map": {"a": "model-1-of-2.safetensors"}}
    assert refusal("h100:1", unknown).exit_code is ExitCode.MISSING
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal("h100:1", unknown, "resources.offload=none", "resources.strategy=single").exit_code is (
        ExitCode.NO_PLAN_FITS
    )
    assert planned(PRESET, "h100:4", unknown).least is not None
    assert refusal("h100:4", unknown, "method.type=qlora").exit_code is ExitCode.MISSING


@pytest.mark.usefixtures("without_torch")
def test_a_model_in_the_hubs_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tmp_path / "hub" / "models--nobody--small"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("abc")
    (stored / "snapshots").mkdir()
    folder_of(stored / "snapshots" / "abc", {"model_type": "nobodys"}, LAYER)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert planned(PRESET, "h100:1", "model.name=nobody/small").least is not None


def tried(*overrides: str) -> Plan:
    loaded = load_job(PRESET, overrides)
    return choose(loaded.job, set(loaded.origins), parse_inventory("h100:8").usable)[1]


def test_harm_03_training_tries_and_says_first_what_it_does_not_know(tmp_path: Path) -> None:
    plan = tried("model.name=nobody/has-this")
    first, second, *_ = plan_lines(RunFolder(tmp_path), plan)
    assert first.startswith("Run folder") and second.startswith("Not estimated: ")
    assert "not known whether this layout fits" in second


def test_harm_03_a_guides_task_gets_a_layout_that_is_called_no_plan() -> None:
    command = [sys.executable, "-m", "trainwright", "plan", "preset:framer-lora-2gpu", "--gpus", "v100-32gb:2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == ExitCode.MISSING
    assert done.stdout.startswith("Not estimated: ") and "Plan for" not in done.stdout
    assert "Layout by rule for framer-lora-2gpu" in done.stdout
    assert "memory per card: 25-27 GB" in done.stdout, "the claim, as a claim"


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "zero2", "zero3"])
def test_the_least_is_part_of_the_estimate_of_a_model_that_is_described(method: str, strategy: str) -> None:
    entry = find("Qwen/Qwen2.5-0.5B")
    assert entry is not None
    parts = anatomy(read_config(entry.config))
    request = Request(
        config=entry.config,
        method=Method(type=method, r=16),  # type: ignore[arg-type]
        strategy=strategy,  # type: ignore[arg-type]
        world_size=1 if strategy == "single" else 4,
        micro_batch_size=1,
        sequence_length=1024,
    )
    least, whole = least_bytes(shapes_of_anatomy(parts), request), memory(parts, request)
    assert least is not None and sum(least.values()) <= whole.allocated_bytes
    for part in ("weights", "adapters", "optimizer"):
        assert least.get(part, 0) == pytest.approx(whole.parts_bytes.get(part, 0), rel=0.01, abs=4096)

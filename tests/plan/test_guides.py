"""What the five guides decide, decided again: their tables as plans, with their claims beside our own figures."""

from __future__ import annotations

import re

import pytest
from planning import planned, told

from trainwright.anatomy import anatomy
from trainwright.anatomy.catalog import config_of
from trainwright.errors import ExitCode, UserError
from trainwright.estimate.inference import weight_bytes
from trainwright.hardware.inventory import parse_inventory
from trainwright.hardware.reading import GIB
from trainwright.plan.modes import answer_mode

PHI = "model.name=microsoft/Phi-4-mini-instruct"
"""The language model inside the guide's Phi-4-multimodal-instruct (S4-51)."""


@pytest.mark.parametrize("gpus, accumulation, batch", [(2, 4, 8), (3, 3, 9), (4, 2, 8)])
def test_framer_presets_by_number_of_gpus(gpus: int, accumulation: int, batch: int) -> None:
    """S0-01 to S0-06, S0-16, S0-19 to S0-21, S0-27: batch, accumulation and ZeRO-2 on A100s, however many there are."""
    for inventory in (f"a100-80gb:{gpus}", f"a100-40gb:{gpus}", "a100-80gb:4"):
        plan = planned(f"preset:framer-lora-{gpus}gpu", inventory)
        layout = plan.layout
        assert (layout.micro_batch_size, layout.gradient_accumulation_steps, layout.ranks) == (1, accumulation, gpus)
        assert layout.global_batch_size == batch
        assert (layout.strategy, layout.precision, layout.offload) == ("zero2", "bf16", "optimizer")
    text = told(f"preset:framer-lora-{gpus}gpu", f"a100-80gb:{gpus}")
    assert "✅ Using ZeRO-2 (faster, sufficient for A100-40GB+)" in text
    assert "Claimed by the guide, not measured here" in text and "memory per card: 25-27 GB" in text
    assert "Not estimated" in text, "a claim never stands in for a figure of ours"


def test_the_odd_batch_of_three_gpus_is_said_aloud() -> None:
    """S0-20, X-03."""
    assert "9, slightly above the 8" in told("preset:framer-lora-3gpu", "a100-80gb:3")


@pytest.mark.parametrize(
    "preset, gpus, reason",
    [
        ("framer-lora-4gpu", "v100-32gb:4", "V100"),
        ("framer-lora-2gpu", "v100-16gb:2", "V100"),
        ("framer-lora-flexible", "a100-80gb:2,v100-32gb:2", "V100"),
        ("framer-lora-2gpu", "rtx-5090:2", "32GB GPU"),
    ],
)
def test_small_or_old_cards_get_zero3_by_themselves(preset: str, gpus: str, reason: str) -> None:
    """S0-13, S0-16, S0-17, S0-22, S0-31, S0-36: no script is edited."""
    plan = planned(f"preset:{preset}", gpus)
    assert plan.layout.strategy == "zero3"
    assert f"{reason} detected - Using ZeRO-3 for memory optimization" in told(f"preset:{preset}", gpus)


@pytest.mark.parametrize("gpus", ["v100-32gb:4", "a100-80gb:2,v100-32gb:2"])
def test_precision_follows_to_fp16_where_a_v100_is(gpus: str) -> None:
    """X-04, S4-18, T-03: ZeRO-3 on V100-32GB never comes with bf16."""
    assert planned("preset:framer-lora-flexible", gpus).layout.precision == "fp16"


def test_a_mixed_set_is_warned_of_and_its_pace_is_shown() -> None:
    """S0-08 to S0-10, S0-14, S0-15, S0-18, S0-28, S0-29: bars, the slowest sets the pace, and a plan all the same."""
    text = told("preset:paper_r64", "a100-80gb:2,v100-32gb:2", PHI, "resources.gpus=4", "data.max_length=512")
    assert "WARNING: Mixed GPU types detected!" in text
    assert "│ index │" in text
    bars = re.findall(r"(A100|V100).*\[(#+) *\] +(\d+)%", text)
    assert [name for name, _, _ in bars] == 2 * ["A100", "A100", "V100", "V100"], "with equal parts, and with unequal"
    assert [int(share) for _, _, share in bars][:2] == [100, 100]
    assert all(int(share) < 100 for _, _, share in bars[2:4])
    assert text.count("bottleneck") >= 2
    assert "all GPUs must synchronise" in text


def test_four_of_a_kind_beat_two_of_each() -> None:
    """S0-09, S0-16, S0-18, S0-23."""
    job = ("preset:paper_r64", PHI, "data.max_length=512", "resources.gpus=4")
    alike = planned(job[0], "a100-80gb:4", *job[1:], samples=2500)
    mixed = planned(job[0], "a100-80gb:2,v100-32gb:2", *job[1:], samples=2500)
    assert alike.estimate is not None and alike.estimate.time is not None
    assert mixed.estimate is not None and mixed.estimate.time is not None
    assert mixed.estimate.time.step_s > 1.4 * alike.estimate.time.step_s, "the guide says 40 % slower"


@pytest.mark.parametrize("gpus, steps, rate", [(1, "7,375", None), (2, "3,687", "2.5e-06"), (4, "1,843", "5e-06")])
def test_steps_and_learning_rates_by_number_of_gpus(gpus: int, steps: str, rate: str | None) -> None:
    """S1-02 to S1-06, S1-18 to S1-22: floor, with separators; the rate is advice and is not applied."""
    overrides = (f"train.global_batch_size={4 * gpus}",)
    text = told("preset:multi-gpu-base", f"a100-80gb:{gpus}", *overrides, samples=29_500)
    assert f"steps per epoch     {steps} (29,500 samples / {4 * gpus}" in text
    plan = planned("preset:multi-gpu-base", f"a100-80gb:{gpus}", *overrides)
    assert plan.learning_rate == 1.25e-6
    if rate is not None:
        assert f"= {rate}" in text
        assert "below a global batch of 256" in text
        assert "try the original learning rate first" in text
        assert "longer warm-up" in text


def test_eight_gpus_make_an_eighth_of_the_steps() -> None:
    """S1-01, S1-02, S1-35."""
    assert "921 (29,500" in told("preset:multi-gpu-base", "a100-80gb:8", "train.global_batch_size=32", samples=29_500)


BATCHES = {8: "156", 12: "104", 16: "78", 20: "62", 24: "52"}


def test_batches_on_two_rtx_3080_with_20_gb() -> None:
    """S2-01 to S2-08, S2-22 to S2-29, S2-35: every level of the table fits, needs more than the one before, and says
    what the guide claims beside our own figure."""
    peaks = []
    for batch, steps in BATCHES.items():
        job = (f"preset:chatlm-fast-{batch}", "rtx-3080-20gb:2,host=16gib")
        plan, text = planned(*job, samples=5000), told(*job, samples=5000)
        assert (plan.layout.micro_batch_size, plan.layout.gradient_accumulation_steps) == (batch, 2)
        assert plan.layout.eval_batch_size == 3 * batch
        assert plan.estimate is not None and plan.estimate.capacity is not None
        assert plan.estimate.peak_bytes < plan.estimate.capacity.total_bytes
        assert plan.estimate.host is not None
        assert plan.estimate.host.node_bytes < 14 * GIB, "S2-16: 2 of 16 GB stay free"
        assert f"steps per epoch     {steps} (5,000 samples / {4 * batch}" in text
        assert re.search(r"GPU memory: \d+-\d+GB", text), "the claim"
        peaks.append(plan.estimate.peak_bytes)
    assert peaks == sorted(peaks)


def test_a_batch_beyond_the_card_is_refused_with_what_would_fit() -> None:
    """S2-08 (28+ is dangerous), S2-30, S2-32."""
    job = ("preset:chatlm-fast-24", "rtx-3080-10gb:2,host=16gib")
    with pytest.raises(UserError) as caught:
        planned(*job, "train.micro_batch_size=96", "train.global_batch_size=384", "train.gradient_checkpointing=false")
    error = caught.value
    assert error.exit_code is ExitCode.NO_PLAN_FITS
    assert any("train.micro_batch_size=" in hint for hint in error.hints)


@pytest.mark.parametrize(
    "model, guide_gib, least, most",
    [("1.5B", 3, 1, 1), ("3B", 6, 1, 1), ("7B", 14, 2, 4), ("14B", 28, 3, 4), ("32B", 64, 6, 8)],
)
def test_models_to_modes_on_eight_rtx_3060(model: str, guide_gib: float, least: int, most: int) -> None:
    """S3-09 to S3-12, S3-18: GPUs for one copy as in the guide's table, with its figure beside ours."""
    parts = anatomy(config_of(f"Qwen/Qwen2.5-{model}-Instruct"))
    mode = answer_mode(parts, parse_inventory("rtx-3060-12gb:8").usable, dtype="fp16", samples=1, length=1024)
    assert least <= mode.gpus_per_replica <= most
    assert mode.mode in (("data_parallel",) if least == 1 else ("data_parallel", "accelerate"))
    assert weight_bytes(parts, "fp16") / 1e9 == pytest.approx(guide_gib, rel=0.1)
    alone = parse_inventory("rtx-3060-12gb:1").usable
    if most == 1:
        assert answer_mode(parts, alone, dtype="fp16", samples=1, length=1024).mode == "single"


@pytest.mark.parametrize("asked", ["single", "data_parallel"])
def test_a_replica_that_cannot_fit_is_refused_with_the_figures(asked: str) -> None:
    """X-09, X-10: 7B on 12 GB cards."""
    parts = anatomy(config_of("Qwen/Qwen2.5-7B-Instruct"))
    with pytest.raises(UserError, match=r"weights 14\.2 GiB .* room for 1\d\.\d") as caught:
        answer_mode(parts, parse_inventory("rtx-3060-12gb:4").usable, asked, dtype="fp16", samples=1, length=1024)  # type: ignore[arg-type]
    assert caught.value.exit_code is ExitCode.NO_PLAN_FITS
    assert "gpu_mode=accelerate" in caught.value.render()


def test_too_large_for_all_cards_is_refused() -> None:
    """X-13: fewer GPUs are no remedy where the model is spread over them."""
    parts = anatomy(config_of("Qwen/Qwen2.5-72B-Instruct"))
    with pytest.raises(UserError, match="does not fit on 8") as caught:
        answer_mode(parts, parse_inventory("rtx-3060-12gb:8").usable, dtype="fp16", samples=1, length=1024)
    assert "fewer GPUs" not in caught.value.render()


@pytest.mark.parametrize(
    "gpu, low, high", [("rtx-3090", 4, 8), ("a100-40gb", 8, 16), ("a100-80gb", 16, 32), ("v100-32gb", 4, 8)]
)
def test_batches_by_card_keep_64(gpu: str, low: int, high: int) -> None:
    """S4-30, S4-31: every batch of the guide's table is planned with the accumulation that keeps 64."""
    for batch in (low, high):
        overrides = (PHI, f"train.micro_batch_size={batch}", "data.max_length=256")
        plan = planned("preset:paper_r64", f"{gpu}:1", *overrides, samples=2500)
        assert plan.layout.gradient_accumulation_steps == 64 // batch
        assert plan.layout.global_batch_size == 64
        assert plan.layout.precision == ("fp16" if gpu.startswith("v100") else "bf16")
        assert plan.estimate is not None and plan.estimate.capacity is not None
    text = told("preset:paper_r64", f"{gpu}:1", PHI, "data.max_length=256", samples=2500)
    assert "A100 80GB, batch 16: 2-3 h" in text, "S4-44: the claims stand beside our figures"
    assert "steps per epoch     40 (2,500 samples / 64, the last one smaller)" in text, "S4-39, X-01"
    assert re.search(r"run +\d", text)


def test_four_gpus_keep_64_and_not_256() -> None:
    """X-05: accumulation follows."""
    layout = planned("preset:paper_r64", "a100-80gb:4", PHI, "resources.gpus=4", "data.max_length=256").layout
    assert (layout.micro_batch_size, layout.gradient_accumulation_steps, layout.ranks) == (8, 2, 4)

"""The presets: every one loads, and holds the numbers of its guide."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from trainwright.job.loading import load_job
from trainwright.job.preset import GUIDES, Arithmetic, arithmetic, preset_text
from trainwright.job.schedule import effective_batch, scaled_learning_rate, steps_per_epoch
from trainwright.job.schema import BUILT_IN_TASKS, PLANNED_TASKS, Job


def preset(name: str, *overrides: str) -> tuple[Job, Arithmetic]:
    job = load_job(f"preset:{name}", overrides).job
    return job, arithmetic(name, job)


def test_the_list_and_the_files_are_the_same() -> None:
    files = resources.files("trainwright.job").joinpath("presets").iterdir()
    assert {Path(file.name).stem for file in files if file.name.endswith(".yaml")} == set(GUIDES)


@pytest.mark.parametrize("name", GUIDES)
def test_every_preset_loads_and_explains_itself(name: str) -> None:
    job, sums = preset(name)
    assert job.name == name
    assert job.description
    assert job.task in BUILT_IN_TASKS + PLANNED_TASKS
    assert sums.effective_batch == job.train.global_batch_size
    assert re.search(r"# .*\b[SX]\d?-\d\d", preset_text(name))
    assert isinstance(job.resources.gpus, str) or job.resources.gpus == sums.gpus


@pytest.mark.parametrize(
    ("name", "micro", "accumulation", "gpus", "batch", "steps"),
    [
        ("framer-lora-2gpu", 1, 4, 2, 8, None),
        ("framer-lora-3gpu", 1, 3, 3, 9, None),
        ("framer-lora-4gpu", 1, 2, 4, 8, None),
        ("framer-lora-flexible", 1, 2, 4, 8, None),
        ("multi-gpu-base", 4, 1, 2, 8, 3687),
        ("multi-gpu-debug", 4, 1, 1, 4, 7375),
        ("chatlm-small", 1, 8, 2, 16, 312),
        ("chatlm-fast-8", 8, 2, 2, 32, 156),
        ("chatlm-fast-12", 12, 2, 2, 48, 104),
        ("chatlm-fast-16", 16, 2, 2, 64, 78),
        ("chatlm-fast-20", 20, 2, 2, 80, 62),
        ("chatlm-fast-24", 24, 2, 2, 96, 52),
        ("paper_r64", 8, 8, 1, 64, 40),
        ("pretrained_r320", 8, 8, 1, 64, 40),
    ],
)
def test_batches_and_steps_are_those_of_the_guides(
    name: str, micro: int, accumulation: int, gpus: int, batch: int, steps: int | None
) -> None:
    """S0-02 to S0-05, S1-02 to S1-04, S2-01 to S2-03, S2-24 to S2-29, S4-31, S4-39."""
    _, sums = preset(name)
    assert (sums.micro_batch_size, sums.gradient_accumulation_steps, sums.gpus) == (micro, accumulation, gpus)
    assert (sums.effective_batch, sums.steps_per_epoch) == (batch, steps)


@pytest.mark.parametrize(
    ("gpus", "batch", "steps", "rate"),
    [(1, 4, 7375, 1.25e-6), (2, 8, 3687, 2.5e-6), (4, 16, 1843, 5e-6), (8, 32, 921, 1e-5)],
)
def test_the_multi_gpu_table(gpus: int, batch: int, steps: int, rate: float) -> None:
    """S1-02, S1-04, S1-18, S1-19: 4 on each GPU, floor, and the linear rule from the batch of one GPU."""
    job, _ = preset("multi-gpu-base", f"train.global_batch_size={batch}")
    train = job.train
    assert isinstance(train.micro_batch_size, int)
    assert train.lr_scaling_base is not None
    assert effective_batch(train.micro_batch_size, 1, gpus) == batch
    assert steps_per_epoch(29500, train.global_batch_size, train.drop_last) == steps
    scaled = scaled_learning_rate(train.learning_rate, train.lr_scaling_base, batch, "linear")
    assert scaled == pytest.approx(rate, rel=1e-12)
    assert train.lr_scaling == "none"


@pytest.mark.parametrize(
    ("name", "r", "alpha", "dropout"), [("paper_r64", 64, 128, 0.05), ("pretrained_r320", 320, 640, 0.01)]
)
def test_the_speech_adapters(name: str, r: int, alpha: float, dropout: float) -> None:
    """S4-16, S4-33, S4-38, S4-39, S4-52: also the checkpoints at 40, 80 and 120."""
    job, sums = preset(name)
    assert (job.method.type, job.method.r, job.method.alpha, job.method.dropout) == ("lora", r, alpha, dropout)
    assert (job.method.adapter is not None) == (name == "pretrained_r320")
    assert (job.train.num_train_epochs, job.train.learning_rate) == (3, 2e-5)
    assert job.train.gradient_checkpointing is True
    assert str(job.checkpoint.every) == "1 epoch"
    assert sums.steps_per_epoch is not None
    assert [sums.steps_per_epoch * epoch for epoch in (1, 2, 3)] == [40, 80, 120]


@pytest.mark.parametrize("name", [name for name in GUIDES if name.startswith("chatlm")])
def test_the_chatlm_settings(name: str) -> None:
    """S2-40, S2-42, S2-46: dimensions, what is frozen, optimizer and schedule."""
    job, _ = preset(name)
    assert job.model.from_scratch is not None
    assert job.model.from_scratch.dimensions == {
        "num_layers": 10, "num_decoder_layers": 10, "d_model": 768, "d_ff": 3072, "num_heads": 12, "d_kv": 64,
    }  # fmt: skip
    assert job.task == "seq2seq"
    assert job.method.freeze == ["shared.*", "encoder.*"]
    train = job.train
    assert (train.optim, train.lr_scheduler_type, train.one_cycle_div_factor) == ("adafactor", "one_cycle", 25)
    assert (train.learning_rate, train.warmup_steps, train.seed, train.num_train_epochs) == (5e-5, 100, 23333, 3)
    assert (job.data.max_length, job.checkpoint.keep, job.resources.precision) == (512, 3, "bf16")


def test_a_chatlm_preset_takes_the_users_weights() -> None:
    """The command in the head of the preset files."""
    job, _ = preset("chatlm-fast-16", "model.name=weights", "model.from_scratch=null", "model.tokenizer=null")
    assert (job.model.name, job.model.from_scratch, job.model.tokenizer) == ("weights", None, None)


def test_the_multi_gpu_settings() -> None:
    """S1-37, S1-38."""
    base, debug = preset("multi-gpu-base")[0], preset("multi-gpu-debug")[0]
    assert (base.train.num_train_epochs, base.train.warmup_steps, base.train.max_grad_norm) == (20, 1000, 0.5)
    assert (base.train.lr_scheduler_type, base.train.min_lr_ratio, base.train.seed) == ("cosine", 0.01, 2025)
    assert (str(base.eval.every), base.eval.limit, str(base.checkpoint.every)) == ("0.5 epochs", 200, "0.5 epochs")
    assert (debug.train.max_steps, debug.train.warmup_steps, debug.eval.limit, debug.checkpoint.keep) == (
        100,
        10,
        10,
        2,
    )
    assert str(debug.eval.every) == str(debug.checkpoint.every) == "50 steps"


@pytest.mark.parametrize("name", [name for name in GUIDES if name.startswith("framer")])
def test_the_framer_settings(name: str) -> None:
    """S0-06, S0-37."""
    job, _ = preset(name)
    assert (job.method.r, job.method.alpha, job.method.dropout) == (64, 64, 0)
    assert (job.train.num_train_epochs, job.train.learning_rate, job.train.warmup_steps) == (30, 1e-4, 500)
    assert (str(job.checkpoint.every), job.train.seed) == ("200 steps", 42)
    assert job.resources.strategy == "auto", "S0-17: the stage follows the GPUs"


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("framer-lora-2gpu", "about 1.5x the baseline"),
        ("framer-lora-3gpu", "about 2.2x the baseline"),
        ("framer-lora-4gpu", "about 3.2x the baseline"),
        ("multi-gpu-base", "6.5-7.0x one GPU (12-18 % lost)"),
        ("chatlm-small", "12 %"),
        ("chatlm-fast-8", "40-50 %"),
        ("chatlm-fast-16", "60-80 %"),
        ("chatlm-fast-20", "70-85 %"),
        ("chatlm-fast-24", "80-95 %"),
        ("paper_r64", "4-6 h"),
    ],
)
def test_claims_are_kept_as_claims(name: str, claim: str) -> None:
    """S0-02 to S0-04, S1-28, S2-24 to S2-28, S4-44, U-11."""
    assert claim in preset(name)[0].claims.values()

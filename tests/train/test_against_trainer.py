"""Each step's loss is that of transformers' Trainer on the same data, seed and order (issue 2, done when 3)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real_runs import CompletedRun, RunTrain, WriteJob

HF_TRAINER = Path(__file__).with_name("hf_trainer.py")
Both = tuple[CompletedRun, list[float]]


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, write_job: WriteJob, run_train: RunTrain, base_model: Path
) -> dict[str, Both]:
    """Full training and LoRA: this tool's run and the Trainer's losses.

    Two micro-batches are accumulated in each step, gradients are clipped, weights decay, and the rate warms up.
    """
    folder = tmp_path_factory.mktemp("against-trainer")
    schedule = {"global_batch_size": 8, "micro_batch_size": 4, "num_train_epochs": 3.0, "warmup_steps": 5}
    optimizer = {"learning_rate": 3e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "adam_beta2": 0.95}
    job = write_job(folder, model={"name": str(base_model)}, data={"limit": 88}, train=schedule | optimizer)
    lora = ("name=lora", "method.type=lora", f"method.adapter={base_model / 'adapter'}", "train.learning_rate=8e-3")
    runs = [run_train(job, "name=full"), run_train(job, *lora)]
    for run in runs:
        assert run.exit_code == 0, run.stderr
    reference = subprocess.run(
        [sys.executable, HF_TRAINER, *(run.folder for run in runs)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert reference.returncode == 0, reference.stderr
    losses = json.loads(reference.stdout.splitlines()[-1])
    return dict(zip(("full", "lora"), zip(runs, losses, strict=True), strict=True))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_losses_equal_those_of_the_trainer(both: dict[str, Both], method: str) -> None:
    """33 steps over three epochs, each to 1e-5."""
    run, trainer_losses = both[method]
    assert len(trainer_losses) == 33
    assert trainer_losses[-1] < trainer_losses[0] - 0.2
    assert sum(record["grad_norm"] > 0.5 for record in run.steps().values()) > 3
    np.testing.assert_allclose(run.losses, trainer_losses, rtol=0, atol=1e-5)

"""The same global batch gives the same losses, however it is cut and whatever shares the work (issue 2, done when 3).

Measured over 50 steps at learning rate 3e-3, in which the loss falls from 5.8 to 2.1: losses within 1.7e-7, gradient
norms within 1e-6 of their size, and final weights within 1.2e-7.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from real_runs import CompletedRun, RunTrain, StartTrain, WriteJob
from safetensors.torch import load_file

STEPS = 50
TRAIN = {"learning_rate": 3e-3, "warmup_steps": 5, "max_steps": STEPS, "weight_decay": 0.1}
CUTS = {
    "1x8x1": (),
    "2x2x2": ("resources.ranks=2", "train.micro_batch_size=2"),
    "2x4x1": ("resources.ranks=2", "train.micro_batch_size=4"),
}
EACH = (*CUTS["2x2x2"], "resources.strategy=fsdp2", "train.sync_each_micro_batch=true")
STRATEGIES = ("fsdp2", pytest.param("zero1", marks=pytest.mark.long), "zero2", "zero3")

RunOf = Callable[[str], CompletedRun]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory, write_job: WriteJob, run_train: RunTrain) -> RunOf:
    """Each run by its name, made once."""
    # The last batch of each epoch holds one sample: on two ranks one of them has nothing to do.
    job = write_job(tmp_path_factory.mktemp("same-losses"), data={"limit": 89}, train={"global_batch_size": 8, **TRAIN})

    @cache
    def run_of(name: str) -> CompletedRun:
        arguments = EACH if name == "reducing-each" else CUTS.get(name, (*CUTS["2x2x2"], f"resources.strategy={name}"))
        run = run_train(job, f"name={name}", *arguments)
        assert run.exit_code == 0, run.stderr
        return run

    return run_of


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final_model" / "model.safetensors")


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_the_run_learns(run_of: RunOf) -> None:
    """Equal losses mean something only if they move: they fall by half, in more than four epochs."""
    run = run_of("1x8x1")
    assert len(run.losses) == STEPS
    assert run.losses[-1] < 0.5 * run.losses[0]
    assert run.steps()[STEPS]["epoch"] > 4


@pytest.mark.parametrize("cut", ["2x2x2", pytest.param("2x4x1", marks=pytest.mark.long)])
def test_ranks_micro_batches_and_accumulation_do_not_change_the_loss(run_of: RunOf, cut: str) -> None:
    """Ranks x micro-batch x accumulation: each step's loss to 1e-6 for 50 steps (X, loss normalised over the whole)."""
    ranks, micro, accumulation = cut.split("x")
    assert f"Effective batch: {micro} x {accumulation} x {ranks} = 8" in run_of(cut).stderr
    np.testing.assert_allclose(run_of(cut).losses, run_of("1x8x1").losses, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", ["2x2x2", *STRATEGIES])
def test_every_strategy_computes_what_one_process_does(run_of: RunOf, strategy: str) -> None:
    """DDP, FSDP2 and ZeRO-1/2/3: each step's loss and gradient norm to 1e-5, and the weights at the end."""
    run, alone = run_of(strategy), run_of("1x8x1")
    name = "ddp" if strategy in CUTS else strategy
    assert f"Running: strategy {name}, world_size 2, device cpu, backend gloo" in run.stderr
    np.testing.assert_allclose(run.losses, alone.losses, rtol=0, atol=1e-5)
    norms = [[record["grad_norm"] for record in r.steps().values()] for r in (run, alone)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)
    assert largest_difference(weights_of(run.folder), weights_of(alone.folder)) < 1e-5


def test_harm_04_reducing_in_every_micro_batch_computes_the_same(
    tmp_path: Path, run_of: RunOf, write_job: WriteJob, start_train: StartTrain, run_train: RunTrain
) -> None:
    """FSDP2 without whole gradients: losses, norms and weights; and a run that was stopped ends bit for bit alike."""
    run, alone = run_of("reducing-each"), run_of("1x8x1")
    assert json.loads((run.folder / "plan.json").read_text())["layout"]["sync_each_micro_batch"] is True
    told = json.loads((run.folder / "training_config.json").read_text())
    assert told["training_args"]["sync_each_micro_batch"] is True
    assert "train.sync_each_micro_batch = True" in run.stderr
    np.testing.assert_allclose(run.losses, alone.losses, rtol=0, atol=1e-5)
    norms = [[record["grad_norm"] for record in r.steps().values()] for r in (run, alone)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)
    assert largest_difference(weights_of(run.folder), weights_of(alone.folder)) < 1e-5
    job = write_job(tmp_path, data={"limit": 89}, train={"global_batch_size": 8, **TRAIN})
    running = start_train(job, *EACH)
    running.wait_for_step(5)
    running.process.send_signal(signal.SIGTERM)
    assert running.finish().exit_code == 75
    resumed = run_train(job, *EACH)
    assert resumed.exit_code == 0, resumed.stderr
    assert "exact: the same weights" in resumed.stderr
    assert resumed.losses == run.losses
    assert largest_difference(weights_of(resumed.folder), weights_of(run.folder)) == 0

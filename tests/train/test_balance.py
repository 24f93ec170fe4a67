"""Ranks of different speed share a step so that none waits, and what is learned stays the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_runs import CompletedRun, RunTrain, WriteJob, read_records

from trainwright.runs.manifest import read_manifest
from trainwright.train.balance import PERIODS, better
from trainwright.train.cutting.split import Split

EPOCHS, BATCH = 8.0, 8
SLOW_S = 0.05


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=9),
    st.integers(0, 300),
    st.booleans(),
)
def test_every_sample_has_one_place_whatever_the_ranks_speeds(
    ranks: list[tuple[int, int]], samples: int, spread: bool
) -> None:
    """S0-08: no rank takes more at once than fits, all make as many micro-steps, and the last is not an empty one."""
    weights, at_once = zip(*ranks, strict=True)
    if not sum(weights):
        return
    split = Split(weights, at_once)
    everything = np.arange(samples, dtype=np.int64)
    parts = split.parts(everything, 1 + everything * 31 % 97, spread=spread)
    together = [part for own in parts for part in own]
    assert sorted(np.concatenate(together).tolist()) == everything.tolist()
    assert len({len(own) for own in parts}) == 1
    for own, most in zip(parts, at_once, strict=True):
        assert max(map(len, own)) <= most
        assert len(own[-1]) or not any(map(len, own))
    if samples == sum(weights):
        assert split.counts(samples) == list(weights)


def test_a_slower_rank_gets_as_much_less() -> None:
    """S0-08: half the speed, half the samples; 24 take the time of 16 and not of 24."""
    equal = Split((12, 12), (4, 4))
    change = better(equal, [[1.0] * PERIODS, [2.0] * PERIODS])
    assert change is not None
    assert change.after == Split((16, 8), (4, 4))
    assert change.gain == pytest.approx(1.5)
    assert change.steady
    assert str(change).startswith("samples a step on each rank: 12 + 12 -> 16 + 8 (measured speeds 100%, 50%; 1.50 ")


@pytest.mark.parametrize(
    "slow",
    [
        [1.1] * PERIODS,  # within what is measured
        [3.0] * (PERIODS - 1) + [1.0],  # another program, and gone again
        [3.0, 0.4] * (PERIODS // 2),
    ],
)
def test_a_split_does_not_follow_noise(slow: list[float]) -> None:
    """Hysteresis: every period has to say the same, and by enough."""
    change = better(Split((12, 12), (4, 4)), [[1.0] * PERIODS, slow])
    assert change is None or not change.steady


def test_a_split_that_fits_the_speeds_stays() -> None:
    assert better(Split((16, 8), (4, 4)), [[1.0] * PERIODS, [1.9] * PERIODS]) is None


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, write_job: WriteJob) -> Path:
    """Two ranks, the second of which takes 50 ms longer for each sample."""
    folder = tmp_path_factory.mktemp("balance")
    shutil.copy(Path(__file__).with_name("slowed_task.py"), folder)
    return write_job(
        folder,
        task="slowed_task:Slowed",
        task_options={"ranks": [1], "sample_s": SLOW_S},
        train={"global_batch_size": BATCH, "learning_rate": 2e-4, "num_train_epochs": EPOCHS},
        checkpoint={"every": "1000 steps", "keep": 1000},
        resources={"ranks": 2, "balance": "auto"},
    )


@pytest.fixture(scope="module")
def equal(job: Path, run_train: RunTrain) -> CompletedRun:
    """The run with equal parts; it needs no slow rank to learn what it learns."""
    run = run_train(job, "name=equal", "resources.balance=off", "task_options.ranks=[]")
    assert run.exit_code == 0, run.stderr
    return run


@pytest.fixture(scope="module")
def balanced(job: Path, run_train: RunTrain) -> CompletedRun:
    run = run_train(job, "name=balanced")
    assert run.exit_code == 0, run.stderr
    return run


def test_the_split_follows_the_measured_speeds_and_the_losses_stay(equal: CompletedRun, balanced: CompletedRun) -> None:
    """Done when 3: the slow rank gets less, with the reason told, and the loss of each step is the equal split's."""
    assert not [event for event in read_records(equal.folder / "events.jsonl") if event["event"] == "balanced"]
    changes = [event for event in read_records(balanced.folder / "events.jsonl") if event["event"] == "balanced"]
    assert len(changes) >= 1
    first = changes[0]
    assert first["before"] == [4, 4]
    assert first["after"][0] > first["after"][1]
    assert sum(first["after"]) == BATCH
    assert f"balance: {first['reason']}" in balanced.stderr
    assert balanced.losses == pytest.approx(equal.losses, abs=1e-6)
    # What follows the change can be done again: a checkpoint holds it.
    manifest = read_manifest(balanced.folder / f"checkpoint-{first['step']}")
    assert manifest.state["rank_samples"] == first["after"]


@pytest.mark.long
def test_a_run_stopped_after_the_change_goes_on_with_the_same_split_to_the_same_bits(
    balanced: CompletedRun, job: Path, tmp_path: Path, run_train: RunTrain
) -> None:
    """G3: from the checkpoint of the change, once more: the same losses and weights, bit by bit."""
    changes = [event for event in read_records(balanced.folder / "events.jsonl") if event["event"] == "balanced"]
    step = changes[-1]["step"]
    folder = tmp_path / "runs" / "balanced"
    shutil.copytree(balanced.folder, folder, symlinks=True)
    shutil.rmtree(folder / "final_model")
    for checkpoint in folder.glob("checkpoint-*"):
        if int(checkpoint.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(checkpoint)
    again = run_train(job, "name=balanced", f"output_dir={tmp_path / 'runs'}")
    again = CompletedRun(again.exit_code, again.stdout, again.stderr, folder)
    assert again.exit_code == 0, again.stderr
    assert f"Resuming from checkpoint-{step} " in again.stderr
    assert again.losses == balanced.losses
    weights = [(run / "final_model" / "model.safetensors").read_bytes() for run in (folder, balanced.folder)]
    assert weights[0] == weights[1]


def test_the_gradient_is_that_of_one_process_however_the_batch_is_shared(tmp_path: Path) -> None:
    """Done when 3: to 1e-6, in parts of 6 and 2, 7 and 1, 8 and none, of samples whose lengths differ.

    One rank then makes three or four passes with samples where the other makes one.
    """
    from safetensors.torch import load_file

    shares = {"6-2": [6, 2], "7-1": [7, 1], "8-0": [8, 0], "3-5": [3, 5]}
    asked = [[f"{strategy}-{name}", strategy, share] for strategy in ("ddp", "fsdp2") for name, share in shares.items()]
    join_ranks(tmp_path, 2, asked)
    join_ranks(tmp_path, 1, [["alone", "single", [8]]])
    alone = load_file(tmp_path / "alone.safetensors")
    assert max(float(gradient.abs().max()) for gradient in alone.values()) > 0.01
    for name, *_ in asked:
        shared = load_file(tmp_path / f"{name}.safetensors")
        assert shared.keys() == alone.keys()
        for key, gradient in alone.items():
            assert float((shared[key] - gradient).abs().max()) < 1e-6, (name, key)


def join_ranks(folder: Path, count: int, asked: list[list[object]]) -> None:
    """Let so many ranks compute gradients."""
    command = [sys.executable, str(Path(__file__).with_name("union_gradients.py"))]
    arguments = [str(folder / f"store-{count}"), str(folder), json.dumps(asked)]
    ranks = [
        subprocess.Popen(
            [*command, *arguments],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=300)
        assert rank.returncode == 0, said

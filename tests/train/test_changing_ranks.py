"""A run that goes on with other ranks, micro-batches and strategies, or with another job (issue 2, done when 5)."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from real_runs import SAMPLES, CompletedRun, RunTrain, StartTrain, WriteJob, read_records

from trainwright.train.data.dataset import TokenDataset
from trainwright.train.data.order import epoch_order

EPOCHS, BATCH, SEED, PEAK = 2, 8, 5, 2e-3
STEPS = 24
MIB = 1 << 20
SAME_STEPS = "same samples and learning rate a step; sums may round differently"
EVERY_SAMPLE = "every sample once an epoch, learning rate by samples seen; steps are cut differently"

# Ranks 2 -> 1 -> 2 -> 2, micro-batch 2 -> 4 -> 4 -> 2, DDP -> alone -> FSDP2 -> ZeRO-2.
LEGS = (
    ("resources.ranks=2", "train.micro_batch_size=2"),
    ("train.micro_batch_size=4",),
    ("resources.ranks=2", "train.micro_batch_size=4", "resources.strategy=fsdp2"),
    ("resources.ranks=2", "train.micro_batch_size=2", "resources.strategy=zero2"),
)
STOPPED_AFTER = (3, 7, 15)
"""Steps at which the first three legs are asked to stop; an epoch is 12 steps."""


@dataclass(frozen=True)
class Chain:
    """One run in four legs, each stopped by SIGTERM but the last, and a copy of its folder after the first leg."""

    legs: tuple[CompletedRun, ...]
    interrupted: Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, write_job: WriteJob) -> Path:
    folder = tmp_path_factory.mktemp("changing-ranks")
    shutil.copy(Path(__file__).with_name("recording_task.py"), folder)
    schedule = {"num_train_epochs": float(EPOCHS), "global_batch_size": BATCH, "seed": SEED}
    train = {**schedule, "learning_rate": PEAK, "warmup_steps": 0.25, "weight_decay": 0.1}
    return write_job(folder, task="recording_task:Recording", task_options={"pause_s": 0.1}, train=train)


@pytest.fixture(scope="module")
def uninterrupted(job: Path, run_train: RunTrain) -> CompletedRun:
    run = run_train(job, "name=uninterrupted")
    assert run.exit_code == 0, run.stderr
    return run


@pytest.fixture(scope="module")
def chain(job: Path, run_train: RunTrain, start_train: StartTrain) -> Chain:
    legs: list[CompletedRun] = []
    interrupted = job.parent / "runs" / "interrupted"
    for arguments, step in zip(LEGS, STOPPED_AFTER, strict=False):
        running = start_train(job, "name=chain", *arguments)
        running.wait_for_step(step)
        running.process.send_signal(signal.SIGTERM)
        legs.append(running.finish())
        if not interrupted.exists():
            shutil.copytree(running.folder, interrupted, symlinks=True)
    legs.append(run_train(job, "name=chain", *LEGS[-1]))
    return Chain(tuple(legs), interrupted)


def shown_by_step(run: CompletedRun) -> dict[int, list[int]]:
    """Return the samples, as rows of the token cache, that the model really was shown in each step, sorted."""
    prepared = json.loads((run.folder / "prepared.json").read_text())
    cache = TokenDataset(prepared["train"]["cache"])
    index = {tuple(cache[i]["input_ids"].tolist()): i for i in range(len(cache))}
    assert len(index) == SAMPLES
    shown: dict[int, list[int]] = {}
    seen = 0
    records = run.steps()
    for attempt in sorted({record["attempt"] for record in records.values()}):
        files = sorted(run.folder.glob(f"shown-{attempt}-*.jsonl"))
        by_rank = [iter(path.read_text().splitlines()) for path in files]
        for step in sorted(step for step, record in records.items() if record["attempt"] == attempt):
            size = records[step]["samples_seen"] - seen
            seen = records[step]["samples_seen"]
            share = size // len(by_rank)
            rows = [tuple(json.loads(next(rank))) for rank in by_rank for _ in range(share)]
            shown[step] = sorted(index[row] for row in rows)
        assert all(next(rank, None) is None for rank in by_rank), "something was shown beyond the recorded steps"
    return shown


def assert_every_sample_once_an_epoch(run: CompletedRun, epochs: int) -> None:
    records, shown = run.steps(), shown_by_step(run)
    for epoch in range(epochs):
        steps = [step for step in shown if epoch < records[step]["epoch"] <= epoch + 1]
        assert Counter(i for step in steps for i in shown[step]) == Counter(range(SAMPLES))


def test_the_legs_are_cut_in_the_middle_of_epochs(chain: Chain) -> None:
    """S01, X: each stop exits 75 and saves where it stopped; the last leg finishes."""
    assert [leg.exit_code for leg in chain.legs] == [75, 75, 75, 0], [leg.stderr for leg in chain.legs]
    last_steps = {record["attempt"]: step for step, record in chain.legs[-1].steps().items()}
    cuts = [last_steps[attempt] for attempt in (1, 2, 3)]
    assert last_steps[4] == STEPS
    assert len({*cuts, 12, STEPS}) == 5, "a cut fell on the end of an epoch"
    assert min(cuts) < 12 < max(cuts)
    for leg, step in zip(chain.legs[1:], cuts, strict=True):
        assert f"Resuming from checkpoint-{step} (step {step}, " in leg.stderr


def test_every_leg_says_what_it_promises(chain: Chain) -> None:
    """The contract's level and the fields that changed are printed."""
    for leg in chain.legs[1:]:
        assert f"Contract: {SAME_STEPS}" in leg.stderr
    assert "ranks: 2 -> 1" in chain.legs[1].stderr
    assert "micro_batch_size: 2 -> 4" in chain.legs[1].stderr
    assert "strategy: single -> fsdp2" in chain.legs[2].stderr
    assert "strategy: fsdp2 -> zero2" in chain.legs[3].stderr


def test_every_leg_is_measured_on_each_of_its_ranks(chain: Chain) -> None:
    """Issue 3, calibration: also a leg that was stopped; on a CPU memory is what is resident, and nothing else."""
    events = read_records(chain.legs[-1].folder / "events.jsonl")
    measured = [event for event in events if event["event"] == "measured"]
    places = [(event["attempt"], event["rank"]) for event in measured]
    assert places == [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1), (4, 0), (4, 1)]
    starts = {event["attempt"]: event["step"] for event in events if event["event"] == "started"}
    ends = {event["attempt"]: event["step"] for event in events if event["event"] in ("stopped", "finished")}
    for event in measured:
        assert event["steps"] == ends[event["attempt"]] - starts[event["attempt"]] - 1
        assert 100 * MIB < event["resident_bytes"] < 8192 * MIB
        on_gpus = ("allocated_bytes", "evaluation_allocated_bytes", "reserved_bytes", "device_bytes")
        assert [event[figure] for figure in on_gpus] == [None] * 4


def test_the_measured_pace_is_that_of_the_steps_after_the_first(uninterrupted: CompletedRun) -> None:
    """Issue 3, calibration: against the figures of each step."""
    (measured,) = (e for e in read_records(uninterrupted.folder / "events.jsonl") if e["event"] == "measured")
    steps = list(uninterrupted.steps().values())
    later_s = [step["step_s"] for step in steps[1:]]
    assert measured["steps"] == len(later_s) == STEPS - 1
    assert measured["step_s_median"] == pytest.approx(float(np.median(later_s)))
    tokens = sum(step["tokens_per_s"] * step["step_s"] for step in steps[1:])
    assert measured["tokens_per_s"] == pytest.approx(tokens / sum(later_s))
    assert measured["resident_bytes"] >= steps[-1]["memory_gib"] * 2**30


def test_every_step_is_that_of_the_uninterrupted_run(chain: Chain, uninterrupted: CompletedRun) -> None:
    """Same samples in each step, same learning rate (1e-12), same loss (1e-5; measured below 3e-7)."""
    run = chain.legs[-1]
    assert shown_by_step(run) == shown_by_step(uninterrupted)
    rates = [[record["learning_rate"] for record in r.steps().values()] for r in (run, uninterrupted)]
    np.testing.assert_allclose(rates[0], rates[1], rtol=1e-12)
    assert len(run.losses) == STEPS
    np.testing.assert_allclose(run.losses, uninterrupted.losses, rtol=0, atol=1e-5)


def test_every_sample_is_shown_once_an_epoch(chain: Chain, uninterrupted: CompletedRun) -> None:
    """By the tokens that reached the model, not by counters; in the order of the epoch."""
    for run in (chain.legs[-1], uninterrupted):
        assert_every_sample_once_an_epoch(run, EPOCHS)
    first = shown_by_step(uninterrupted)[1]
    assert first == sorted(epoch_order(SEED, 0, SAMPLES)[:BATCH].tolist())


CHANGES: dict[str, tuple[Sequence[str], str]] = {
    "global batch": (["train.global_batch_size=16"], "train.global_batch_size: 8 -> 16"),
    "learning rate": (["train.learning_rate=1e-3"], "train.learning_rate: 0.002 -> 0.001"),
    "seed": (["train.seed=6"], "train.seed: 5 -> 6"),
    "optimizer": (["train.optim=adafactor"], "train.optim: adamw -> adafactor"),
    "adapters": (["method.r=4"], "method.r: 16 -> 4"),
    "model": (["model.from_scratch.dimensions.num_hidden_layers=3"], "dimensions.num_hidden_layers: 2 -> 3"),
    "data": (["data.limit=90"], "data: "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_job_is_refused_and_the_field_is_named(
    chain: Chain, job: Path, run_train: RunTrain, change: str
) -> None:
    """Contract `refused`: exit 2 before any rank starts, and all that the run folder holds stays as it was."""
    arguments, problem = CHANGES[change]
    before = sorted(path.name for path in chain.interrupted.glob("checkpoint-*"))
    described = {path.name: path.read_text() for path in chain.interrupted.glob("*.json")}
    run = run_train(job, "name=interrupted", *LEGS[0], *arguments)
    assert run.exit_code == 2, run.stderr
    assert problem in run.stderr
    assert "Running:" not in run.stderr
    assert sorted(path.name for path in chain.interrupted.glob("checkpoint-*")) == before
    assert {path.name: path.read_text() for path in chain.interrupted.glob("*.json")} == described
    consent = change in ("global batch", "learning rate")
    assert (f"--allow {arguments[0].split('=')[0]}" in run.stderr) == consent


@pytest.fixture(scope="module")
def rebatched(chain: Chain, job: Path, run_train: RunTrain) -> CompletedRun:
    """The run interrupted in its first epoch, gone on with twice the global batch."""
    allow = ("--allow", "train.global_batch_size")
    return run_train(job, "name=interrupted", "resources.ranks=2", "train.global_batch_size=16", *allow)


@pytest.mark.long
def test_another_global_batch_goes_on_by_samples_seen(rebatched: CompletedRun) -> None:
    """Contract `every sample once`: with consent the rest of each epoch is cut anew, and the rate follows samples."""
    assert rebatched.exit_code == 0, rebatched.stderr
    assert f"Contract: {EVERY_SAMPLE}" in rebatched.stderr
    assert "train.global_batch_size: 8 -> 16" in rebatched.stderr
    assert_every_sample_once_an_epoch(rebatched, EPOCHS)
    steps = rebatched.steps()
    total, warmup = EPOCHS * SAMPLES, 0.25 * EPOCHS * SAMPLES
    seen = 0
    for step in sorted(steps):
        expected = PEAK * (seen / warmup if seen < warmup else (total - seen) / (total - warmup))
        assert steps[step]["learning_rate"] == pytest.approx(expected, rel=1e-12)
        seen = steps[step]["samples_seen"]
    assert seen == total


@pytest.mark.long
def test_a_finished_run_says_so_and_more_epochs_need_consent(
    rebatched: CompletedRun, job: Path, run_train: RunTrain
) -> None:
    """T: the same command again exits 0 at once; a longer run is another job until it is allowed, then it goes on."""
    same = ("name=interrupted", "resources.ranks=2", "train.global_batch_size=16")
    allow = ("--allow", "train.global_batch_size")
    again = run_train(job, *same, *allow)
    assert again.exit_code == 0, again.stderr
    assert "Already finished" in again.stderr
    assert len(again.metrics) == len(rebatched.metrics)

    refused = run_train(job, *same, "train.num_train_epochs=3.0")
    assert refused.exit_code == 2
    assert "train.num_train_epochs: 2.0 -> 3.0" in refused.stderr

    longer = run_train(job, *same, "train.num_train_epochs=3.0", "--allow", "train.num_train_epochs")
    assert longer.exit_code == 0, longer.stderr
    assert longer.steps()[max(longer.steps())]["samples_seen"] == 3 * SAMPLES
    assert_every_sample_once_an_epoch(longer, 3)

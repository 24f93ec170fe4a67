"""What a resume promises, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainwright.hardware.inventory import parse_inventory
from trainwright.job.schema import Job
from trainwright.launch.contract import Level, Verdict, compare, contract_of
from trainwright.plan.choose import choose


def contract(gpus: str = "a100-80gb:2", data: str = "0" * 64, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the contract of a job on an inventory that is only written down."""
    values: dict[str, Any] = {"name": "x", "model": {"name": "org/model"}, "data": {"path": "x.jsonl"}, **sections}
    job, plan = choose(Job.model_validate(values), ("train.global_batch_size",), parse_inventory(gpus).devices)
    return contract_of(job, plan.layout, plan.learning_rate, {"data_fingerprint": data})


def resumed(before: dict[str, Any], now: dict[str, Any], *allowed: str) -> Verdict:
    """Compare as a resume does: the former contract has been through a file."""
    return compare(json.loads(json.dumps(before)), now, allowed)


def test_the_same_job_on_the_same_devices_is_exact() -> None:
    """E0: nothing differs, so the weights will not."""
    verdict = resumed(contract(), contract())
    assert verdict == Verdict(Level.EXACT, (), ())


@pytest.mark.parametrize(
    "now, fields",
    [
        (contract("a100-80gb:1"), {"ranks", "strategy", "gradient_accumulation_steps"}),
        (contract("a100-80gb:4"), {"ranks", "gradient_accumulation_steps"}),
        (contract(resources={"strategy": "fsdp2"}), {"strategy"}),
        (contract(resources={"strategy": "zero2"}), {"strategy"}),
        (contract("v100-32gb:2"), {"precision"}),
        (contract(train={"micro_batch_size": 4}), {"micro_batch_size", "gradient_accumulation_steps"}),
    ],
)
def test_another_geometry_keeps_samples_and_learning_rate_of_each_step(now: dict[str, Any], fields: set[str]) -> None:
    """E1, R02, R03: it needs nobody's word, and every field that differs is named."""
    verdict = resumed(contract(), now)
    assert verdict.level is Level.SAME_STEPS
    assert fields <= {difference.key for difference in verdict.differences}
    assert not verdict.refused


def test_harm_08_a_run_of_a_version_that_did_not_sort_goes_on() -> None:
    """Its steps have the same samples, which stood in other micro-batches: sums may round differently."""
    before = contract()
    del before["geometry"]["micro-batches"]
    verdict = resumed(before, contract())
    assert verdict.level is Level.SAME_STEPS
    assert list(map(str, verdict.differences)) == ["micro-batches: null -> by length"]


def test_another_version_of_a_library_is_told() -> None:
    """R10"""
    before = contract()
    before["geometry"]["version of torch"] = "2.10.0"
    verdict = resumed(before, contract())
    assert verdict.level is Level.SAME_STEPS
    assert str(verdict.differences[0]).startswith("version of torch: 2.10.0 -> ")


@pytest.mark.parametrize(
    "key, value",
    [
        ("learning_rate", 1e-4),
        ("lr_scheduler_type", "cosine"),
        ("warmup_steps", 10.0),
        ("num_train_epochs", 5.0),
        ("max_steps", 500),
        ("weight_decay", 0.1),
        ("global_batch_size", 64),
    ],
)
def test_another_schedule_or_batch_needs_the_users_word(key: str, value: object) -> None:
    """R04, R05, E2: never ignored, never taken unasked."""
    now = contract(train={key: value})
    refused = resumed(contract(), now)
    assert refused.level is Level.REFUSED
    assert [difference.key for difference in refused.refused] == [f"train.{key}"]
    granted = resumed(contract(), now, f"train.{key}")
    assert granted.level is Level.EVERY_SAMPLE
    assert f"train.{key}" in {difference.key for difference in granted.differences}


def test_a_peak_that_only_follows_from_a_granted_change_is_not_refused_again() -> None:
    """R03: with lr_scaling the peak follows from the batch; the one word covers both."""
    scaling = {"lr_scaling": "linear", "lr_scaling_base": 32}
    before, now = contract(train=scaling), contract(train={"global_batch_size": 64, **scaling})
    assert now["schedule"]["peak learning rate"] == 2 * before["schedule"]["peak learning rate"]
    assert resumed(before, now, "train.global_batch_size").level is Level.EVERY_SAMPLE


def test_a_batch_cannot_change_where_the_end_is_counted_in_steps() -> None:
    """R03: another batch would move the end of a run of max_steps; consent does not help."""
    before, now = contract(train={"max_steps": 100}), contract(train={"max_steps": 100, "global_batch_size": 64})
    verdict = resumed(before, now, "train.global_batch_size")
    assert verdict.level is Level.REFUSED
    assert [difference.key for difference in verdict.refused] == ["train.global_batch_size"]


@pytest.mark.parametrize(
    "now, key",
    [
        (contract(data="1" * 64), "data"),
        (contract(model={"name": "org/other"}), "model.name"),
        (contract(method={"type": "lora"}, train={"learning_rate": 2e-5}), "method.type"),
        (contract(method={"r": 4}), "method.r"),
        (contract(train={"seed": 7}), "train.seed"),
        (contract(train={"optim": "adafactor"}), "train.optim"),
        (contract(task="mine:Task"), "task"),
    ],
)
def test_another_model_method_data_or_optimizer_is_refused_whatever_is_allowed(now: dict[str, Any], key: str) -> None:
    """E3, R06, R07: no word makes a checkpoint of another job fit."""
    verdict = resumed(contract(), now, key, f"train.{key}")
    assert verdict.level is Level.REFUSED
    assert [difference.key for difference in verdict.refused] == [key]


def test_harm_04_reducing_in_every_micro_batch_is_told_and_a_run_of_an_earlier_release_is_exact() -> None:
    shared = {"resources": {"strategy": "fsdp2"}, "train": {"global_batch_size": 32, "micro_batch_size": 1}}
    once = contract(**shared)
    assert "sync_each_micro_batch" not in once["geometry"]  # as in the manifests of checkpoints before there was one
    each = contract(**shared | {"train": {**shared["train"], "sync_each_micro_batch": True}})
    verdict = resumed(once, each)
    assert verdict.level is Level.SAME_STEPS
    assert [difference.key for difference in verdict.differences] == ["sync_each_micro_batch"]

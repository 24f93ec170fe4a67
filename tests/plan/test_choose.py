"""The plan for a job on devices that are only written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.inventory import Device, parse_inventory
from trainwright.job.loading import load_job
from trainwright.job.preset import GUIDES
from trainwright.job.schema import PLANNED_TASKS, Job
from trainwright.plan.choose import Plan, choose
from trainwright.plan.requirements import require_runnable
from trainwright.plan.wish import Wish

CPU = (Device(kind="cpu", name="a processor"),)


def job(**sections: Any) -> Job:
    return Job.model_validate({"name": "x", "model": {"name": "m"}, "data": {"path": "d.jsonl"}, **sections})


def plan(devices: str | tuple[Device, ...], **sections: Any) -> Plan:
    """Plan a job; what its `train` section says counts as given."""
    if isinstance(devices, str):
        devices = parse_inventory(devices).devices
    return choose(job(**sections), {f"train.{key}" for key in sections.get("train", {})}, devices)[1]


def refusal(devices: str | tuple[Device, ...], **sections: Any) -> str:
    with pytest.raises(UserError) as caught:
        plan(devices, **sections)
    return caught.value.render()


@pytest.mark.parametrize("gpus, micro, accumulation", [(1, 8, 1), (2, 4, 1), (3, 3, 1), (4, 2, 1), (8, 1, 1)])
def test_the_global_batch_is_kept_on_any_number_of_gpus(gpus: int, micro: int, accumulation: int) -> None:
    """S0-02 to S0-04, X-05: 8 on 1, 2, 3, 4 and 8 GPUs; on three the parts are 3, 3 and 2."""
    made = plan(f"a100-80gb:{gpus}", train={"global_batch_size": 8})
    assert made.layout.global_batch_size == 8
    assert (made.layout.micro_batch_size, made.layout.gradient_accumulation_steps) == (micro, accumulation)
    assert made.layout.ranks == gpus
    assert made.layout.strategy == ("single" if gpus == 1 else "ddp")
    assert made.layout.visible_devices == ",".join(str(index) for index in range(gpus))


def test_accumulation_follows_from_a_given_micro_batch() -> None:
    """S2-01, S2-02, S4-31, X-05: 64 is 8 x 8 on one GPU and 8 x 2 on four, never 256."""
    batch = {"global_batch_size": 64, "micro_batch_size": 8}
    assert plan("a100-40gb:1", train=batch).layout.gradient_accumulation_steps == 8
    assert plan("a100-40gb:4", train=batch).layout.gradient_accumulation_steps == 2


def test_a_global_batch_that_nobody_gave_follows_from_the_two_others() -> None:
    """S0-02: micro-batch and accumulation given, the batch not."""
    made = plan("a100-80gb:2", train={"micro_batch_size": 1, "gradient_accumulation_steps": 4})
    assert made.layout.global_batch_size == 8
    assert made.choices["train.global_batch_size"].reason == "micro-batch x accumulation x ranks = 1 x 4 x 2"


def test_a_batch_that_does_not_come_out_shows_the_equation() -> None:
    batch = {"global_batch_size": 8, "micro_batch_size": 1, "gradient_accumulation_steps": 2}
    assert "1 x 2 x 2 = 4, but train.global_batch_size = 8" in refusal("a100-80gb:2", train=batch)


@pytest.mark.parametrize(
    "gpus, precision", [("v100-32gb:2", "fp16"), ("a100-80gb:2", "bf16"), ("a100-80gb:1,v100-32gb:1", "fp16")]
)
def test_precision_follows_the_weakest_device_and_says_why(gpus: str, precision: str) -> None:
    """S4-18 to S4-22."""
    made = plan(gpus)
    assert made.layout.precision == precision
    assert "compute capability" in made.choices["resources.precision"].reason
    assert made.warnings == ()


@pytest.mark.parametrize("gpus", ["v100-32gb:2", "a100-80gb:1,v100-32gb:1"])
def test_bf16_that_was_asked_for_and_cannot_be_is_warned_of(gpus: str) -> None:
    """S4-20: also where only the second GPU cannot do it."""
    made = plan(gpus, resources={"precision": "bf16"})
    assert made.layout.precision == "fp16"
    assert len(made.warnings) == 1 and "BF16" in made.warnings[0]


def test_offload_is_done_by_zero() -> None:
    """Chosen where the strategy is free, refused where another was asked for."""
    asked = {"offload": "optimizer"}
    assert plan("rtx-3090:2", resources=asked).layout.strategy == "zero3"
    assert plan("rtx-3090:1", resources=asked).layout.strategy == "zero3"
    assert "is done by ZeRO" in refusal("rtx-3090:2", resources={"strategy": "fsdp2", **asked})
    needs = refusal("rtx-3090:2", resources={"strategy": "zero2", "offload": "optimizer+parameters"})
    assert "needs resources.strategy=zero3" in needs


@pytest.mark.parametrize(
    "gpus, optim, strategy, allowed",
    [
        ("a100-80gb:2", "adafactor", "ddp", True),
        ("a100-80gb:2", "adafactor", "fsdp2", False),
        ("a100-80gb:2", "adafactor", "zero1", False),
        ("a100-80gb:2", "adamw_8bit", "ddp", True),
        ("a100-80gb:2", "adamw_8bit", "zero3", False),
        ("a100-80gb:2", "adamw_8bit", "fsdp2", False),
        (CPU, "adamw_8bit", "auto", False),
    ],
)
def test_an_optimizer_that_would_learn_otherwise_under_a_strategy_is_refused(
    gpus: str | tuple[Device, ...], optim: str, strategy: str, allowed: bool
) -> None:
    sections = {"train": {"optim": optim}, "resources": {"strategy": strategy}}
    if allowed:
        assert plan(gpus, **sections).layout.strategy == strategy
    else:
        told = refusal(gpus, **sections)
        assert f"train.optim={optim}" in told and "hint: train.optim=adamw" in told


def test_ranks_are_one_a_gpu_and_as_many_as_asked_on_the_cpu() -> None:
    assert "one process a GPU" in refusal("a100-80gb:2", resources={"ranks": 3})
    assert plan(CPU).layout.ranks == 1
    assert plan(CPU, resources={"ranks": 3}).layout.strategy == "ddp"
    assert plan(CPU).layout.visible_devices is None


def test_evaluation_takes_three_times_the_micro_batch_unless_told() -> None:
    """S2-22."""
    assert plan("a100-80gb:2", train={"global_batch_size": 8}).layout.eval_batch_size == 12
    assert plan("a100-80gb:2", eval={"batch_size": 5}).layout.eval_batch_size == 5


@pytest.mark.parametrize("scaling, peak", [("none", 1e-4), ("linear", 4e-4), ("sqrt", 2e-4)])
def test_the_learning_rate_is_scaled_only_where_asked(scaling: str, peak: float) -> None:
    """S1-18 to S1-22: and the advice is printed either way."""
    train = {"global_batch_size": 32, "learning_rate": 1e-4, "lr_scaling": scaling, "lr_scaling_base": 8}
    made = plan("a100-80gb:4", train=train)
    assert made.learning_rate == pytest.approx(peak)
    assert made.advice


@pytest.mark.parametrize(
    ("sections", "rate", "reason"),
    [
        ({"method": {"type": "lora"}}, 2e-4, "usual for lora"),
        ({"method": {"type": "qlora"}}, 2e-4, "usual for qlora"),
        ({}, 2e-5, "usual for training all weights"),
        (
            {"model": {"from_scratch": {"architecture": "llama"}, "tokenizer": {"vocab_size": 300}}},
            3e-4,
            "usual for a model from scratch",
        ),
    ],
)
def test_harm_07_a_learning_rate_left_open_is_that_of_the_method(
    sections: dict[str, Any], rate: float, reason: str
) -> None:
    """A value with its reason, printed and stored; one that is given is taken as it is and is no choice."""
    settled, made = choose(job(**sections), (), CPU)
    assert settled.train.learning_rate == made.learning_rate == rate
    assert made.to_json()["choices"]["train.learning_rate"]["value"] == rate
    assert made.choices["train.learning_rate"].reason.startswith(reason)
    settled, made = choose(job(**sections, train={"learning_rate": 3e-5}), ("train.learning_rate",), CPU)
    assert settled.train.learning_rate == made.learning_rate == 3e-5
    assert "train.learning_rate" not in made.choices


def test_the_same_job_and_devices_give_the_same_bytes() -> None:
    plans = [json.dumps(plan("a100-80gb:3").to_json()) for _ in range(2)]
    assert plans[0] == plans[1]
    assert all(choice["reason"] for choice in json.loads(plans[0])["choices"].values())


@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("gpus", ["rtx-3090:1", "rtx-3060-12gb:2", "v100-32gb:4", "h100:8"])
def test_every_preset_is_planned_and_one_whose_task_comes_later_says_so(name: str, gpus: str) -> None:
    """S0, S1, S2, S4: the batch of the guide is kept on every inventory, in the precision that the GPUs can do."""
    loaded = load_job(f"preset:{name}", ["data.path=train.jsonl"])
    given = {key for key, origin in loaded.origins.items() if origin.kind != "default"}
    devices = parse_inventory(gpus).devices
    if loaded.job.task in PLANNED_TASKS:
        with pytest.raises(UserError, match=loaded.job.task) as caught:
            require_runnable(loaded.job)
        assert caught.value.exit_code is ExitCode.MISSING
        return
    planned, made = choose(loaded.job, given, devices)
    layout = made.layout
    assert planned.train.global_batch_size == loaded.job.train.global_batch_size == layout.global_batch_size
    assert layout.micro_batch_size * layout.gradient_accumulation_steps * layout.ranks >= layout.global_batch_size
    assert layout.precision == ("fp16" if gpus.startswith("v100") else "bf16")


def test_a_job_without_data_is_told_what_to_add() -> None:
    with pytest.raises(UserError) as caught:
        require_runnable(Job.model_validate({"name": "x", "model": {"name": "m"}}))
    assert "data.path=train.jsonl" in caught.value.render()


def test_a_model_folder_that_is_not_there_is_no_name_of_the_hub(tmp_path: Path) -> None:
    job = {"name": "x", "model": {"name": str(tmp_path / "final_model")}, "data": {"path": "train.jsonl"}}
    with pytest.raises(UserError, match="there is no folder") as caught:
        require_runnable(Job.model_validate(job))
    assert caught.value.exit_code is ExitCode.MISSING
    (tmp_path / "final_model").mkdir()
    require_runnable(Job.model_validate(job))


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_without_a_saved_base_are_refused(method: str) -> None:
    """DoD 2: 4-bit packing would silently not happen, and the adapters would load onto nothing."""
    said = refusal(
        CPU,
        model={"from_scratch": {"architecture": "llama"}, "tokenizer": {"vocab_size": 400}},
        method={"type": method},
    )
    assert f"method.type={method}" in said
    assert "model.from_scratch has none" in said
    assert "train it first with method.type=full" in said


def test_host_memory_that_nobody_said_is_held_to_what_is_usual() -> None:
    """Twice the memory of the node's GPUs; where a size is named there is nothing to assume."""
    for gpus, name, is_warned in (
        ("h100:8", "meta-llama/Llama-3.1-405B", True),
        ("h100:8,host=20000gib", "meta-llama/Llama-3.1-405B", False),
        ("rtx-3060-12gb:1", "Qwen/Qwen2.5-0.5B", False),
    ):
        inventory = parse_inventory(gpus)
        made = choose(job(model={"name": name}), set(), inventory.devices, Wish(host=inventory.host))[1]
        warned = [warning for warning in made.warnings if "host memory" in warning]
        assert [("1,274 GiB is usual (assumed" in warning) for warning in warned] == [True] * is_warned

"""Several GPUs: what connects them decides whether more of them are faster, and by how much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from steps_in_time import BERT_LARGE, LLAMA_7B, LORA, devices, model, samples_a_second, step

from trainwright.estimate.request import Method, Request
from trainwright.estimate.time import step_time

# The rows of published measurements in which more GPUs were slower: BERT-large on SQuAD, 384 tokens, fp32 weights in
# TF32, with the micro-batch that fits the card.
SQUAD: dict[str, Any] = {
    "config": BERT_LARGE,
    "precision": "fp32",
    "weights": "fp32",
    "tf32": True,
    "attention": "eager",
    "sequence_length": 384,
}


@pytest.mark.parametrize(
    ("fewer", "more", "micro_batch"),
    [("rtx-3080-10gb:1", "rtx-3080-10gb:2", 2), ("rtx-3090:1", "rtx-3090:4", 8), ("rtx-3090:4", "rtx-3090:8", 8),
     ("rtx-3070:4", "rtx-3070:8", 1)],
)  # fmt: skip
def test_more_geforce_cards_can_be_slower(fewer: str, more: str, micro_batch: int) -> None:
    """The known traps: gradients go through host memory, which the cards share, and small batches hide nothing."""
    assert samples_a_second(more, micro_batch_size=micro_batch, **SQUAD) < samples_a_second(
        fewer, micro_batch_size=micro_batch, **SQUAD
    )


def test_the_same_job_scales_on_gpus_with_nvlink() -> None:
    one = samples_a_second("a100-40gb:1", micro_batch_size=16, **SQUAD)
    assert samples_a_second("a100-40gb:8", micro_batch_size=16, **SQUAD) > 6 * one


def test_sharding_over_geforce_cards_is_slower_than_copies_where_copies_fit() -> None:
    """LoRA of a 7 B model on two RTX 3090 without NVLink: full sharding moves the weights twice a step."""
    trained = {"method": LORA, "gradient_checkpointing": "reentrant", "micro_batch_size": 1, "sequence_length": 512}
    copies = step("rtx-3090:2", strategy="ddp", **trained)
    sharded = step("rtx-3090:2", strategy="fsdp2", **trained)
    assert sharded.step_s > 2 * copies.step_s
    assert sharded.limit == "communication"
    long = trained | {"micro_batch_size": 8, "sequence_length": 2048}
    assert step("rtx-3090:2", strategy="fsdp2", **long).step_s < 1.3 * step("rtx-3090:2", strategy="ddp", **long).step_s


def test_nvlink_is_faster_than_pcie_and_pcie_than_host_memory() -> None:
    """S0-10: the connection may be the bottleneck."""
    found = devices("a100-80gb:4")
    bare = tuple(replace(device, nvlink=None) for device in found)
    request = Request(config=LLAMA_7B, precision="bf16", micro_batch_size=1, sequence_length=512, strategy="fsdp2",
                      world_size=4)  # fmt: skip
    with_nvlink, over_pcie, through_host = (
        step_time(model(LLAMA_7B), request, gpus, peer_access=peers).step_s
        for gpus, peers in ((found, True), (bare, True), (bare, False))
    )
    assert with_nvlink < over_pcie < through_host


def test_fewer_lanes_are_slower() -> None:
    found = devices("a6000:2")
    narrow = tuple(replace(device, pcie_generation=3, pcie_width=8) for device in found)
    request = Request(config=LLAMA_7B, precision="bf16", micro_batch_size=1, sequence_length=512, strategy="fsdp2",
                      world_size=2)  # fmt: skip
    assert step_time(model(LLAMA_7B), request, narrow).step_s > step_time(model(LLAMA_7B), request, found).step_s


def test_accumulation_pays_for_communication_once() -> None:
    """DDP reduces gradients after the last micro-batch only."""
    often = samples_a_second("rtx-3090:4", micro_batch_size=1, method=Method(type="full"))
    seldom = samples_a_second("rtx-3090:4", micro_batch_size=1, gradient_accumulation_steps=16)
    assert seldom > 2 * often


def test_an_unknown_network_widens_the_range() -> None:
    given = step("a100-80gb:8x2", strategy="fsdp2", micro_batch_size=1, sequence_length=512, network_gb_s=200)
    assumed = step("a100-80gb:8x2", strategy="fsdp2", micro_batch_size=1, sequence_length=512)
    assert assumed.high_s - assumed.low_s > 1.5 * (given.high_s - given.low_s)
    slow = step("a100-80gb:8x2", strategy="fsdp2", micro_batch_size=1, sequence_length=512, network_gb_s=10)
    assert slow.step_s > 2 * given.step_s


def test_states_in_host_memory_cost_time() -> None:
    """S2: offloading saves GPU memory and pays over PCIe and with the CPU's Adam."""
    values: dict[str, Any] = {"strategy": "zero3", "micro_batch_size": 1, "sequence_length": 512}
    kept = step("a100-80gb:2", **values)
    offloaded = step("a100-80gb:2", offload="optimizer", **values)
    further = step("a100-80gb:2", offload="optimizer+parameters", **values)
    assert kept.step_s < offloaded.step_s < further.step_s
    assert offloaded.parts_s["offload"] > kept.parts_s["optimizer"]


def test_each_strategy_moves_what_it_moves() -> None:
    """Without NVLink, from least to most bytes: ZeRO-2 scatters and gathers once, ZeRO-3 gathers twice besides."""
    values: dict[str, Any] = {"micro_batch_size": 1, "sequence_length": 512, "gradient_accumulation_steps": 4}
    waits = {
        strategy: step("a6000:4", strategy=strategy, **values).parts_s["communication"]
        for strategy in ("ddp", "zero1", "zero2", "zero3")
    }
    assert waits["zero1"] < waits["zero2"] < waits["zero3"]


def test_harm_04_reducing_in_every_micro_batch_takes_the_time_of_the_reductions() -> None:
    """Nothing in a step of one micro-batch; over PCIe as much again for each micro-batch but the last."""
    how: dict[str, Any] = {"strategy": "fsdp2", "micro_batch_size": 1, "sequence_length": 512}

    def added_s(micro_steps: int) -> float:
        once, each = (
            step("rtx-4090:8", gradient_accumulation_steps=micro_steps, sync_each_micro_batch=sync, **how).parts_s
            for sync in (False, True)
        )
        return each["communication"] - once["communication"]

    assert added_s(1) == 0
    assert added_s(3) > 0
    assert added_s(5) == pytest.approx(2 * added_s(3))

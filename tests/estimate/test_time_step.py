"""What a step costs on one GPU: the physics that a user relies on when the plan compares methods and settings."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from steps_in_time import BERT_LARGE, LLAMA_7B, LORA, QLORA, SMALL, devices, model, samples_a_second, step

from trainwright.anatomy.catalog import find
from trainwright.errors import UserError
from trainwright.estimate.closed import memory
from trainwright.estimate.request import Method, Request
from trainwright.estimate.time import step_time, why_not
from trainwright.estimate.time.update import Update


def test_lora_saves_the_weights_gradients_and_no_more() -> None:
    """A frozen matrix has no gradient of its own: two of three products remain, so a third is the most to save."""
    full, lora = step("h100").step_s, step("h100", method=LORA).step_s
    assert full / 1.6 < lora < full


def test_unpacking_4_bit_weights_costs_time() -> None:
    """QLoRA saves memory, not time: every use of a weight unpacks it first.

    Of adapters in fp32 peft casts what each reads, but not beside packed weights, which outweighs the unpacking.
    """

    def step_s(method: Method) -> float:
        return step("a100-80gb", method=replace(method, adapter_dtype="base")).step_s

    assert step_s(QLORA) > step_s(LORA)


def test_checkpointing_costs_about_a_third_more_of_a_full_step() -> None:
    """S4-33: the forward pass runs twice; the head and the update do not."""
    without = step("a100-80gb", gradient_checkpointing="none").step_s
    non_reentrant = step("a100-80gb", gradient_checkpointing="non_reentrant").step_s
    reentrant = step("a100-80gb", gradient_checkpointing="reentrant").step_s
    assert 1.15 < non_reentrant / without < 1.36
    assert (
        non_reentrant < reentrant < 1.36 * without
    )  # the early stop of the non-reentrant kind saves a product a layer


@pytest.mark.parametrize("gpus", ["a100-80gb", "rtx-4090", "a100-80gb:4"])
def test_a_larger_micro_batch_is_never_slower_at_the_same_global_batch(gpus: str) -> None:
    """S4-30 to S4-32: batch and accumulation trade places, the global batch stays."""
    speeds = [
        samples_a_second(gpus, micro_batch_size=size, gradient_accumulation_steps=16 // size)
        for size in (1, 2, 4, 8, 16)
    ]
    assert all(larger >= 0.999 * smaller for smaller, larger in pairwise(speeds))


def test_attention_grows_with_the_square_of_the_length() -> None:
    short = step("a100-80gb", micro_batch_size=8, sequence_length=2048).parts_s["attention"]
    long = step("a100-80gb", micro_batch_size=1, sequence_length=16384).parts_s["attention"]
    assert 5 < long / short < 8.5  # the same tokens, eight times as long; short sequences use the kernel less well


def test_attention_that_keeps_its_scores_is_slower() -> None:
    assert step("a100-80gb", attention="eager").step_s > 1.1 * step("a100-80gb", attention="flash_attention_2").step_s


@pytest.mark.parametrize("name", ["google/gemma-2-9b", "bigscience/bloom-7b1", "mosaicml/mpt-7b"])
def test_harm_16_attention_that_is_eager_for_memory_is_eager_for_time(name: str) -> None:
    """transformers has no fused attention for these families: nobody has to ask for the eager one."""
    entry = find(name)
    assert entry is not None
    parts, long = model(entry.config), {"micro_batch_size": 1, "sequence_length": 8192}
    found = [
        (
            step("h100", entry.config, method=LORA, **long, **asked).step_s,
            memory(parts, Request(config=entry.config, **long, **asked)),
        )
        for asked in ({}, {"attention": "eager"})
    ]
    assert found[0] == found[1]


def test_a_small_model_is_bound_by_the_launch_of_its_kernels() -> None:
    """A faster GPU does not help where the CPU cannot start kernels fast enough."""
    small = {"micro_batch_size": 1, "sequence_length": 128}
    found = step("h100", SMALL, **small)
    assert found.limit == "kernel launches"
    assert found.step_s == pytest.approx(step("a100-80gb", SMALL, **small).step_s, rel=0.05)
    assert step("h100").limit == "matrix products"


def test_a_host_of_unknown_speed_widens_the_range_of_small_steps_alone() -> None:
    small = step("h100", SMALL, micro_batch_size=1, sequence_length=128)
    large = step("h100")
    assert small.low_s < small.step_s / 2 and small.high_s > 1.5 * small.step_s
    assert large.high_s < 1.5 * large.step_s


def test_workstations_launch_faster_than_servers_and_a_set_of_cards_has_one_host() -> None:
    small: dict[str, Any] = {"config": SMALL, "micro_batch_size": 1, "sequence_length": 128}
    assert 2 * step("rtx-4090", **small).step_s < step("h100", **small).step_s
    together = step("rtx-4090,a100-80gb", **small)
    assert together.ranks_s[0] == pytest.approx(together.ranks_s[1], rel=0.05)


def test_cudnn_is_faster_than_flash_attention_2_on_hopper_and_taken_by_itself() -> None:
    """transformers pull request 48163: 1.7 to 2.3 times as fast for training."""
    own, flash, ampere, asked = (
        step(gpu, batch="full", attention=kernel).parts_s["attention"]
        for gpu, kernel in (("h100", "auto"), ("h100", "flash"), ("a100-80gb", "auto"), ("a100-80gb", "flash"))
    )
    assert 1.4 < flash / own < 2.3
    assert ampere == asked


@pytest.mark.parametrize("batch", ["padded", "packed"])
def test_a_mask_makes_attention_compute_what_it_hides(batch: str) -> None:
    """Kernels that know no mask but the causal one skip half of the pairs; those with one compute all."""
    full, masked = (step("h100", batch=each).parts_s["attention"] for each in ("full", batch))
    assert 1.7 < masked / full < 2.1


def test_an_update_tensor_by_tensor_waits_for_its_launches() -> None:
    adafactor, eight_bit, fused = (
        step("h100", SMALL, optimizer=kind).parts_s["optimizer"] for kind in ("adafactor", "adamw_8bit", "adamw")
    )
    assert adafactor > eight_bit > 2 * fused


def test_arithmetic_that_is_faster_makes_a_faster_step() -> None:
    fp32 = step("a100-80gb", precision="fp32", weights="fp32").step_s
    tf32 = step("a100-80gb", precision="fp32", weights="fp32", tf32=True).step_s
    bf16 = step("a100-80gb").step_s
    assert fp32 > 2 * tf32 > 2 * bf16
    assert step("v100-32gb", precision="fp32", weights="fp32", tf32=True).step_s == pytest.approx(
        step("v100-32gb", precision="fp32", weights="fp32").step_s
    )  # Volta has no TF32


def test_bf16_is_refused_where_the_gpu_has_none() -> None:
    """S4-22, X-04: no figure for arithmetic that a V100 does not have, and what to choose instead."""
    with pytest.raises(UserError, match=r"V100.*no bf16.*fp16"):
        step("v100-32gb")
    assert step("v100-32gb", precision="fp16", weights="fp16").step_s > 0


def test_an_unknown_gpu_gets_a_statement_and_no_number() -> None:
    """X: no made-up figure; a processor has none either."""
    known = devices("a100-80gb")[0]
    request = Request(config=LLAMA_7B, micro_batch_size=1, sequence_length=512)
    unknown = replace(known, catalog_key=None, name="NVIDIA Zeta 9000")
    assert why_not(request, (known,)) is None
    with pytest.raises(UserError, match=r"NVIDIA Zeta 9000.*not in the catalogue"):
        step_time(model(LLAMA_7B), request, (unknown,))
    processor = replace(known, kind="cpu", catalog_key=None, name="a processor")
    assert "not estimated" in (why_not(request, (processor,)) or "")


def test_the_range_holds_the_estimate_and_the_parts_sum_to_it() -> None:
    for gpus in ("a100-80gb", "rtx-3090:2", "h100:8x2"):
        found = step(gpus)
        assert found.low_s < found.step_s < found.high_s
        assert sum(found.parts_s.values()) == pytest.approx(found.step_s)
        assert found.limit in found.parts_s


def test_faster_gpus_make_a_faster_step() -> None:
    """S4-44 ranks RTX 3090, A100 40 GB, A100 80 GB; the estimate must at least agree on the order."""
    order = ["t4", "rtx-3090", "a100-40gb", "h100", "b200"]
    times = [step(gpu, method=LORA, precision="fp16", weights="fp16").step_s for gpu in order]
    assert times == sorted(times, reverse=True)


def test_the_update_written_out_is_slower_than_the_fused_one() -> None:
    fused, foreach, loop = (
        step("a100-80gb", BERT_LARGE, sequence_length=128, optimizer=kind).parts_s["optimizer"]
        for kind in ("adamw", "adamw_foreach", "adamw_loop")
    )
    assert fused < foreach < loop


def test_an_update_that_waits_for_the_gpu_at_each_tensor_hides_no_launch() -> None:
    """Small tensors are bound by their launches, large ones by memory: no queue evens that out."""

    def update_s(**values: Any) -> float:
        own = Update(30, kernels=20, **values)
        return step("a100-80gb", BERT_LARGE, weights="fp32", precision="fp32", update=own).parts_s["optimizer"]

    parameters = model(BERT_LARGE).parameters()
    assert update_s() < update_s(waits=True) < update_s() + len(parameters) * 21 * 12e-6


def test_gradients_that_are_no_views_of_their_buckets_are_copied_out_again() -> None:
    """torch's default; the workers keep their gradients in the buckets."""
    apart = step("a100-80gb:2", recipe="transformers").parts_s["communication"]
    together = step("a100-80gb:2").parts_s["communication"]
    bytes_copied = 2 * 2 * model(LLAMA_7B).parameter_count
    assert apart - together == pytest.approx(bytes_copied / 2.0e12, rel=0.3)


def test_accumulated_micro_batches_cost_what_they_cost_and_one_update() -> None:
    one, four = step("a100-80gb"), step("a100-80gb", gradient_accumulation_steps=4)
    assert four.parts_s["matrix products"] == pytest.approx(4 * one.parts_s["matrix products"])
    assert four.step_s < 4 * one.step_s

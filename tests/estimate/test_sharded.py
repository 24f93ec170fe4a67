"""FSDP2 and DDP traced as one rank of a fake group, against a real group of two gloo processes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.placement_types import Shard, _StridedShard
from tracing import LLAMA, phases, really_run, request, trace

from trainwright.estimate.trace.distributed import look_once_for_shards_of_shards

CPU_FSDP2 = {"device": "cpu", "strategy": "fsdp2", "world_size": 2, "gradient_checkpointing": "non_reentrant"}
CASES = {
    "bf16 policy": request(**CPU_FSDP2),
    "fp32, two micro-batches": request(**CPU_FSDP2, precision="fp32", gradient_accumulation_steps=2),
    "fp32, two micro-batches, reducing each": request(
        **CPU_FSDP2, precision="fp32", gradient_accumulation_steps=2, sync_each_micro_batch=True
    ),
    "three micro-batches, reducing each": request(
        **CPU_FSDP2, gradient_accumulation_steps=3, sync_each_micro_batch=True
    ),
    "lora": request(**CPU_FSDP2, method={"type": "lora", "r": 8, "adapter_dtype": "base"}),
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    answers = json.loads(trace(list(CASES.values()), tmp_path_factory.mktemp("traced")).stdout)
    return {name: phases(answer) for name, answer in zip(CASES, answers, strict=True)}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    found = really_run(list(CASES.values()), tmp_path_factory.mktemp("real"), ranks=2)
    return dict(zip(CASES, found, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_static_memory_of_a_rank_is_that_of_a_real_group(
    name: str, traced: dict[str, dict[str, int]], real: dict[str, dict[str, int]]
) -> None:
    assert traced[name]["static"] == real[name]["static"]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_peaks_of_a_rank_are_those_of_a_real_group(
    name: str, traced: dict[str, dict[str, int]], real: dict[str, dict[str, int]]
) -> None:
    """Exact until the first reduction; from then on gloo holds more, as it clones what it reduces, in its own threads.

    torch/csrc/distributed/c10d/ProcessGroupGloo.cpp; NCCL reduces in place.
    """
    assert traced[name]["forward 1"] == pytest.approx(real[name]["forward 1"], rel=0.01)
    assert traced[name].keys() == real[name].keys()
    for phase, peak in real[name].items():
        assert traced[name][phase] <= 1.01 * peak, phase


def test_what_the_number_of_ranks_changes(tmp_path: Path) -> None:
    """Weights and optimizer shrink with the ranks of FSDP2, and not under DDP; one process plays any number of them."""
    ranks = (2, 8, 64)
    asked = [request(strategy="fsdp2", world_size=n, batch="full") for n in ranks]
    asked += [request(strategy="ddp", world_size=n, batch="full") for n in (2, 8)] + [request(batch="full")]
    *sharded, ddp_2, ddp_8, single = json.loads(trace(asked, tmp_path).stdout)
    whole = single["static_bytes"]
    for n, answer in zip(ranks, sharded, strict=True):
        parts = answer["peak"]["parts_bytes"]
        assert answer["static_bytes"] == pytest.approx(whole / n, rel=0.01)
        assert parts["optimizer"] == pytest.approx(2 * whole / n, rel=0.01)
        assert answer["peak"]["allocated_bytes"] < single["peak"]["allocated_bytes"]
    assert ddp_2["peak"] == ddp_8["peak"]
    assert ddp_2["static_bytes"] == pytest.approx(
        2 * whole, rel=0.01
    )  # with the buckets, in which the gradients will lie


@pytest.mark.long
def test_checkpoints_around_units_keep_the_gradients_of_all_layers(tmp_path: Path) -> None:
    """FSDP1 with a transformers before 4.53: one gradient of a layer's output more for each layer."""
    layers, hidden = 8, 2 * 128 * 256 * 2
    how = {"strategy": "fsdp1", "world_size": 2, "recipe": "transformers", "batch": "full", "weights": "bf16"}
    asked = request(
        LLAMA | {"num_hidden_layers": layers, "vocab_size": 64},
        **how,
        autocast=False,
        gradient_checkpointing="reentrant",
        method={"type": "lora", "r": 8},
    )
    answers = json.loads(trace([asked, asked | {"checkpoint_around_unit": True}], tmp_path).stdout)
    inside, around = (phases(answer)["backward 2"] for answer in answers)
    assert around - inside == pytest.approx((layers - 1) * hidden, abs=3 * hidden)


def test_shards_of_shards_still_agree_on_their_order() -> None:
    """What torch looks for in all arguments of an operator is looked for once, and where it is there, torch goes on."""
    look_once_for_shards_of_shards()

    def spec(placement: Shard, in_order: bool) -> SimpleNamespace:
        return SimpleNamespace(placements=(placement,), use_strided_shard_as_shard_order=in_order, shard_order=())

    for placement, changed in ((_StridedShard(0, split_factor=2), True), (Shard(0), False)):
        made = spec(placement, in_order=False)
        strategy = SimpleNamespace(strategies=[SimpleNamespace(output_specs=(made,), input_specs=None)])
        schema = SimpleNamespace(args_spec=(spec(placement, in_order=True),))
        _sharding_prop._propagate_use_strided_shard_flag(strategy, schema)  # type: ignore[arg-type]
        assert made.use_strided_shard_as_shard_order == changed

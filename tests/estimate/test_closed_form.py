"""The closed form of memory against the traced step, and what must be true of any layout (issue 3)."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gloo import run_group
from hypothesis import given, settings
from hypothesis import strategies as st
from tracing import BERT, ENVIRONMENT, GPT2, HERE, LLAMA, T5, really_run, trace

from trainwright.anatomy import Anatomy, anatomy, read_config
from trainwright.errors import UserError
from trainwright.estimate.allocator import LARGE_SEGMENT_BYTES
from trainwright.estimate.closed import memory, replayed
from trainwright.estimate.closed.zero import BUCKET
from trainwright.estimate.figures import PARTS, Memory
from trainwright.estimate.request import Method, Request

DEEP: dict[str, Any] = LLAMA | {"num_hidden_layers": 5}
ROOTED = DEEP | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CHECKPOINTED = {"gradient_checkpointing": "non_reentrant"}
LORA, QLORA = {"method": {"type": "lora", "r": 8}}, {"method": {"type": "qlora", "r": 8}}
SHARDED, REPLICATED = {"strategy": "fsdp2", "world_size": 4}, {"strategy": "ddp", "world_size": 4}
BLOOM: dict[str, Any] = {"hidden_size": 256, "n_head": 4, "n_layer": 5, "vocab_size": 4096}
GRANITE_SCALES = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def asked(config: dict[str, Any], model_type: str | None = None, **values: Any) -> dict[str, Any]:
    """Return a request for a model of five layers or so."""
    named = config | ({"model_type": model_type} if model_type else {})
    return {"config": named, "micro_batch_size": 3, "sequence_length": 192, "batch": "full", **values}


CASES: dict[str, dict[str, Any]] = {
    "full": asked(DEEP),
    "full, padded": asked(DEEP, batch="padded"),
    "full, padded, no mask": asked(DEEP, batch="padded", padding_mask=False),
    "full, eager, no mask": asked(DEEP, attention="eager", batch="padded", padding_mask=False),
    "full, packed": asked(DEEP, batch="packed"),
    "full, checkpointed": asked(DEEP, **CHECKPOINTED),
    "full, accumulated": asked(DEEP, gradient_accumulation_steps=3),
    "full, fp32": asked(DEEP, precision="fp32"),
    "full, fp16 on a V100": asked(DEEP, precision="fp16", compute_capability=[7, 0]),
    "full, eager": asked(DEEP, attention="eager", batch="padded"),
    "8-bit optimizer": asked(DEEP, optimizer="adamw_8bit"),
    "adafactor": asked(DEEP, optimizer="adafactor", sequence_length=32),
    "foreach": asked(DEEP, optimizer="adamw_foreach", sequence_length=32),
    "lora": asked(DEEP, **LORA),
    "lora, checkpointed": asked(DEEP, **LORA, **CHECKPOINTED, batch="padded"),
    "qlora, checkpointed": asked(DEEP, **QLORA, **CHECKPOINTED),
    "ddp": asked(DEEP, **REPLICATED, gradient_accumulation_steps=2),
    "fsdp2": asked(DEEP, **SHARDED),
    "fsdp2, checkpointed": asked(DEEP, **SHARDED, **CHECKPOINTED),
    "fsdp2, lora, accumulated": asked(DEEP, **SHARDED, **LORA, gradient_accumulation_steps=2),
    "fsdp2, lora, reducing each": asked(
        DEEP, **SHARDED, **LORA, gradient_accumulation_steps=2, sync_each_micro_batch=True
    ),
    "fsdp2, reducing each": asked(
        DEEP, **SHARDED, **CHECKPOINTED, gradient_accumulation_steps=3, sync_each_micro_batch=True
    ),
    "fsdp2, qlora": asked(DEEP, **SHARDED, **QLORA, **CHECKPOINTED),
    "evaluated": asked(DEEP, evaluation_batch_size=9),
    "trainer": asked(DEEP, recipe="transformers", weights="bf16", gradient_checkpointing="reentrant"),
    "qwen2": asked(DEEP | {"tie_word_embeddings": True}, "qwen2", **CHECKPOINTED),
    "qwen3": asked(DEEP | {"head_dim": 32}, "qwen3", batch="padded"),
    "gemma2": asked(DEEP | {"head_dim": 32, "sliding_window": 64}, "gemma2"),
    "gemma3": asked(DEEP | {"head_dim": 32, "sliding_window": 64, "num_hidden_layers": 8}, "gemma3_text"),
    "phi3": asked(ROOTED, "phi3", **CHECKPOINTED),
    "phi3, a part turned": asked(ROOTED | {"partial_rotary_factor": 0.75}, "phi3"),
    "olmo2": asked(ROOTED, "olmo2", batch="padded"),
    "olmo2, fsdp2": asked(ROOTED, "olmo2", **SHARDED),
    "olmo3": asked(ROOTED | {"sliding_window": 64, "num_hidden_layers": 8}, "olmo3", **CHECKPOINTED),
    "smollm3": asked(ROOTED | {"num_hidden_layers": 8}, "smollm3", **LORA),
    "granite, scaled": asked(ROOTED | GRANITE_SCALES, "granite"),
    "granite, 4 bits": asked(ROOTED | GRANITE_SCALES, "granite", **QLORA, **CHECKPOINTED),
    "glm": asked(ROOTED | {"head_dim": 32}, "glm", **LORA, **CHECKPOINTED),
    "glm4": asked(ROOTED | {"head_dim": 32}, "glm4"),
    "ministral": asked(ROOTED | {"head_dim": 32, "sliding_window": 64}, "ministral", **SHARDED),
    "ministral3": asked(ROOTED | {"head_dim": 32}, "ministral3", batch="packed"),
    "seed_oss": asked(ROOTED | {"head_dim": 32}, "seed_oss"),
    "seed_oss, eager": asked(ROOTED | {"head_dim": 32}, "seed_oss", attention="eager", batch="padded"),
    "hunyuan": asked(ROOTED | {"head_dim": 32}, "hunyuan_v1_dense", batch="padded"),
    "exaone4": asked(ROOTED | {"sliding_window": 64, "num_hidden_layers": 8}, "exaone4", batch="padded", **LORA),
    "ernie4_5": asked(ROOTED | {"head_dim": 32}, "ernie4_5"),
    "ernie4_5, 4 bits": asked(ROOTED | {"head_dim": 32}, "ernie4_5", **QLORA, **CHECKPOINTED),
    "starcoder2": asked(ROOTED, "starcoder2", **LORA),
    "gpt2": asked(GPT2 | {"n_layer": 5, "bos_token_id": 1, "eos_token_id": 2}, batch="padded"),
    "gpt-neox": asked(DEEP, "gpt_neox"),
    "mpt": asked({"d_model": 256, "n_heads": 4, "n_layers": 5, "vocab_size": 4096}, "mpt"),
    "bloom": asked(BLOOM, "bloom", batch="padded"),
    "bloom, lora, checkpointed": asked(BLOOM, "bloom", batch="padded", **LORA, **CHECKPOINTED),
    "phi": asked(DEEP, "phi"),
    "experts": asked(DEEP | EXPERTS, "qwen3_moe", **LORA, **CHECKPOINTED),
    "experts, fsdp2": asked(DEEP | EXPERTS, "qwen3_moe", **SHARDED),
    "t5": asked(T5, auto_class="AutoModelForSeq2SeqLM", target_length=64, batch="padded"),
    "t5, qlora": asked(T5, auto_class="AutoModelForSeq2SeqLM", target_length=64, **QLORA),
    "t5, lora, fp16": asked(
        T5, auto_class="AutoModelForSeq2SeqLM", target_length=64, precision="fp16", weights="fp16", **LORA
    ),
    "t5, qlora, fp16": asked(
        T5, auto_class="AutoModelForSeq2SeqLM", target_length=64, precision="fp16", weights="fp16", **QLORA
    ),
    "bert": asked(BERT, auto_class="AutoModelForMaskedLM", recipe="transformers", batch="padded"),
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    answers = json.loads(trace(list(CASES.values()), tmp_path_factory.mktemp("traced")).stdout)
    return dict(zip(CASES, answers, strict=True))


def closed(name: str) -> Memory:
    return memory(model_of(CASES[name]["config"]), Request.parse(CASES[name]))


def model_of(config: dict[str, Any]) -> Anatomy:
    return anatomy(read_config(config, from_scratch=True))


@pytest.mark.parametrize("name", CASES)
def test_peak_is_that_of_the_traced_step_and_made_of_the_same_parts(
    name: str, traced: dict[str, dict[str, Any]]
) -> None:
    """Two ways that must agree: 2 % is allowed, these are within 0.5 %, and no part is off by more than 1 % of all."""
    found, parts = closed(name), dict(traced[name]["peak"]["parts_bytes"])
    without_rounding = traced[name]["peak"]["allocated_bytes"] - parts.pop("rounding", 0)
    del parts["cached"]
    own = {part: size for part, size in found.parts_bytes.items() if part != "rounding"}
    assert sum(own.values()) == pytest.approx(without_rounding, rel=0.005)
    case = CASES[name]
    accumulates = case.get("gradient_accumulation_steps", 1) > 1 and not case.get("sync_each_micro_batch")
    if case.get("strategy") == "fsdp2" and accumulates:
        return  # the trace has no name for the whole gradients that FSDP2 carries from one micro-batch to the next
    for part in parts.keys() | own.keys():
        assert own.get(part, 0) == pytest.approx(parts.get(part, 0), abs=0.01 * without_rounding), part


@pytest.mark.parametrize("name", CASES)
def test_replayed_reserves_what_the_traced_step_reserves(name: str, traced: dict[str, dict[str, Any]]) -> None:
    """2 % is allowed, or, as these models are small, one segment."""
    found = replayed(model_of(CASES[name]["config"]), Request.parse(CASES[name]))
    expected = traced[name]["peak"]["reserved_bytes"]
    assert found.reserved_bytes == pytest.approx(expected, abs=max(0.02 * expected, LARGE_SEGMENT_BYTES))
    assert found.allocated_bytes == pytest.approx(traced[name]["peak"]["allocated_bytes"], rel=0.01)
    assert sum(found.parts_bytes.values()) == found.allocated_bytes
    assert found.device_bytes - found.reserved_bytes == sum(found.outside_bytes.values())


def test_replayed_evaluation_follows_the_steps(traced: dict[str, dict[str, Any]]) -> None:
    """To the byte, whether or not the steps have left enough."""
    found = replayed(model_of(CASES["evaluated"]["config"]), Request.parse(CASES["evaluated"]))
    assert found.evaluation_reserved_bytes == traced["evaluated"]["evaluation"]["reserved_bytes"]
    assert found.evaluation_reserved_bytes >= found.reserved_bytes


def test_evaluation_has_a_peak_of_its_own(traced: dict[str, dict[str, Any]]) -> None:
    expected = traced["evaluated"]["evaluation"]["requested_bytes"]
    assert closed("evaluated").evaluation_bytes == pytest.approx(expected, rel=0.01)
    assert closed("full").evaluation_bytes is None


@pytest.mark.parametrize("name", CASES)
def test_parts_add_up(name: str) -> None:
    found = closed(name)
    assert sum(found.parts_bytes.values()) == found.allocated_bytes <= found.reserved_bytes
    assert found.parts_bytes.keys() <= set(PARTS)
    assert sum(found.outside_bytes.values()) == found.device_bytes - found.reserved_bytes
    assert all(size > 0 for size in found.parts_bytes.values())


def test_reserved_memory_counts_what_the_allocator_cannot_use_again(tmp_path: Path) -> None:
    """Logits large enough to have segments of their own: too high by a fifth is allowed, too low by a twentieth; where
    every piece is replayed, 2 %."""
    wide = DEEP | {"vocab_size": 128_000, "hidden_size": 512}
    requests = [
        asked(wide, sequence_length=1024, **method, **checkpointed, **strategy)
        for method in ({}, LORA)
        for checkpointed in ({}, CHECKPOINTED)
        for strategy in ({}, SHARDED)
    ]
    answers = json.loads(trace(requests, tmp_path).stdout)
    for data, answer in zip(requests, answers, strict=True):
        model, request, expected = model_of(wide), Request.parse(data), answer["peak"]["reserved_bytes"]
        assert 0.95 <= memory(model, request).reserved_bytes / expected <= 1.2, data
        assert replayed(model, request).reserved_bytes == pytest.approx(expected, rel=0.02), data


WIDE = DEEP | {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8, "vocab_size": 8192}
WIDE_BLOOM = {"hidden_size": 512, "n_head": 8, "n_layer": 5, "vocab_size": 8192}
WIDE_T5 = {"d_model": 512, "d_ff": 1024, "num_layers": 5, "num_heads": 8, "vocab_size": 8192}
ANSWERED = CHECKPOINTED | {"auto_class": "AutoModelForSeq2SeqLM", "target_length": 256}
IN_FRAMES: dict[str, dict[str, Any]] = {
    "one sample's bias": asked(WIDE_T5, "t5", micro_batch_size=1, sequence_length=4096, batch="padded", **ANSWERED),
    "bias of eight": asked(WIDE_T5, "t5", micro_batch_size=8, sequence_length=2048, **ANSWERED),
    "bias, fsdp2": asked(WIDE_T5, "t5", micro_batch_size=1, sequence_length=4096, **SHARDED, **ANSWERED),
    "bloom": asked(WIDE_BLOOM, "bloom", micro_batch_size=8, sequence_length=2048, batch="padded", **LORA),
    "bloom, fsdp2": asked(WIDE_BLOOM, "bloom", micro_batch_size=8, sequence_length=2048, **SHARDED, **CHECKPOINTED),
    "mpt, fsdp2": asked(
        {"d_model": 512, "n_layers": 5, "n_heads": 8, "vocab_size": 8192},
        "mpt",
        micro_batch_size=8,
        sequence_length=2048,
        batch="padded",
        **LORA,
        **SHARDED,
        **CHECKPOINTED,
    ),
    "opt": asked(
        WIDE | {"ffn_dim": 2048, "word_embed_proj_dim": 512},
        "opt",
        micro_batch_size=4,
        sequence_length=1024,
        batch="padded",
    ),
    "gpt2, fsdp2": asked(
        {"n_embd": 512, "n_layer": 5, "n_head": 8, "vocab_size": 8192, "bos_token_id": 1, "eos_token_id": 2},
        "gpt2",
        micro_batch_size=8,
        sequence_length=2048,
        batch="padded",
        **SHARDED,
        **CHECKPOINTED,
    ),
    "mixtral": asked(
        WIDE | {"num_local_experts": 8},
        "mixtral",
        micro_batch_size=1,
        sequence_length=4096,
        batch="padded",
        **QLORA,
        **CHECKPOINTED,
    ),
    "packed": asked(WIDE, "qwen2", micro_batch_size=2, sequence_length=4096, batch="packed"),
}
"""Where it decides in which order frames, lists and the engine let go of what is large."""


def test_replayed_lets_go_in_the_order_of_the_models_frames(tmp_path: Path) -> None:
    """1 % of reserved memory, and 0.2 % of what is allocated."""
    answers = json.loads(trace(list(IN_FRAMES.values()), tmp_path).stdout)
    for (name, data), answer in zip(IN_FRAMES.items(), answers, strict=True):
        found = replayed(model_of(data["config"]), Request.parse(data))
        assert found.reserved_bytes == pytest.approx(answer["peak"]["reserved_bytes"], rel=0.01), name
        assert found.allocated_bytes == pytest.approx(answer["peak"]["allocated_bytes"], rel=0.002), name


TOKENS = {"micro_batch_size": 4, "sequence_length": 1024}
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IN_ORDER: dict[str, dict[str, Any]] = {
    "llama": asked(WIDE, "llama", **TOKENS, **LORA, **CHECKPOINTED),
    "llama, fsdp2": asked(WIDE, "llama", **TOKENS, **SHARDED),
    "llama, fsdp2, twice": asked(WIDE, "llama", gradient_accumulation_steps=2, **TOKENS, **SHARDED),
    "llama, fsdp2, reducing each": asked(
        WIDE, "llama", gradient_accumulation_steps=2, sync_each_micro_batch=True, **TOKENS, **SHARDED
    ),
    "mistral": asked(WIDE, "mistral", **TOKENS, **QLORA),
    "qwen2": asked(WIDE, "qwen2", **TOKENS, **QLORA, **CHECKPOINTED),
    "phi3": asked(WIDE | SPECIAL_IDS, "phi3", **TOKENS, **QLORA, **CHECKPOINTED),
    "starcoder2": asked(WIDE | SPECIAL_IDS, "starcoder2", batch="padded", **TOKENS, **LORA),
    "hunyuan": asked(WIDE | {"head_dim": 64}, "hunyuan_v1_dense", batch="padded", **TOKENS, **LORA),
    "gpt_neox, fsdp2": asked(WIDE, "gpt_neox", **TOKENS, **SHARDED),
    "gpt_neox, 4 bits, fsdp2": asked(WIDE, "gpt_neox", **TOKENS, **QLORA, **SHARDED, **CHECKPOINTED),
}


def test_all_that_is_large_comes_and_goes_as_in_the_trace(tmp_path: Path) -> None:
    """Every piece of 1 MiB and more of two steps, one after the other: what is reserved hangs on that order."""
    path = tmp_path / "requests.json"
    path.write_text(json.dumps(list(IN_ORDER.values())))
    command = [sys.executable, str(HERE / "events.py"), str(path), str(1 << 20)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for name, events in zip(IN_ORDER, json.loads(done.stdout), strict=True):
        traced = events["traced"]
        assert len(traced) > 500
        assert events["closed"][-len(traced) :] == traced, name


def test_zero_holds_what_deepspeed_really_holds(tmp_path: Path) -> None:
    """Two gloo processes under ZeRO-1, 2 and 3: weights in bf16, fp32 weights and moments of one rank."""
    real = _two_ranks(DEEP, [1, 2, 3], tmp_path)
    for stage in (1, 2, 3):
        request = _request(strategy=f"zero{stage}", world_size=2)
        parts = memory(model_of(DEEP), request).parts_bytes
        held = real[str(stage)]
        assert parts["weights"] == pytest.approx(held["weights"], rel=0.001)
        assert parts["optimizer"] == pytest.approx(held["masters"] + held["moments"], rel=0.001)


SMALL_ZERO = {"micro_batch_size": 2, "sequence_length": 128, "world_size": 2}
TWICE = {"gradient_accumulation_steps": 2}
IN_BUCKETS: dict[str, dict[str, Any]] = {
    "zero1, checkpointed": asked(DEEP, strategy="zero1", **SMALL_ZERO, **CHECKPOINTED),
    "zero1, accumulated": asked(DEEP, strategy="zero1", **SMALL_ZERO, **TWICE),
    "zero2, accumulated": asked(DEEP, strategy="zero2", **SMALL_ZERO, **TWICE),
    "zero3": asked(DEEP, strategy="zero3", **SMALL_ZERO),
}


def test_a_step_under_deepspeed_takes_what_the_closed_form_says(tmp_path: Path) -> None:
    """The workers' steps in two gloo processes: 1 % of what is there beside the buckets.

    A trace cannot say it, as fake tensors cannot pass the engine; gloo on the CPU has no workspaces, and no blocks. Its
    threads may hold what they reduced a moment too long, so the lower of two steps counts.
    """
    by_workers = [data | {"device": "cpu", "workers_code": True} for data in IN_BUCKETS.values()]
    for (name, data), peaks in zip(IN_BUCKETS.items(), really_run(by_workers, tmp_path, ranks=2), strict=True):
        found = memory(model_of(DEEP), Request.parse(data))
        highest = min(
            max(peaks[f"{phase} {step}"] for phase in ("forward", "backward", "optimizer")) for step in (2, 3)
        )
        here = found.allocated_bytes - found.parts_bytes["workspaces"] - found.parts_bytes.get("rounding", 0)
        buckets = (1 if name.startswith("zero3") else 2) * 2 * BUCKET
        assert highest > buckets
        assert here - highest == pytest.approx(0, abs=0.01 * (highest - buckets)), (name, peaks)


def test_offload_leaves_the_optimizer_to_the_host() -> None:
    model = model_of(DEEP)
    whole = {"strategy": "zero3", "world_size": 2}
    kept, optimizer, both = (
        memory(model, _request(**whole, offload=offload)) for offload in ("none", "optimizer", "optimizer+parameters")
    )
    assert kept.allocated_bytes > optimizer.allocated_bytes > both.allocated_bytes
    assert "optimizer" not in optimizer.parts_bytes
    assert "weights" not in both.parts_bytes


LAYOUTS = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(["ddp", "fsdp2", "zero1", "zero2", "zero3"]),
        "gradient_checkpointing": st.sampled_from(["none", "non_reentrant"]),
        "gradient_accumulation_steps": st.sampled_from([1, 4]),
        "method": st.sampled_from([Method(), Method(type="lora", r=8), Method(type="qlora", r=8)]),
        "world_size": st.sampled_from([2, 4, 8]),
        "sequence_length": st.sampled_from([64, 256]),
        "batch": st.sampled_from(["full", "padded"]),
    }
)
ROUND = DEEP | {"intermediate_size": 1024}
"""All dimensions can be divided by the numbers of ranks."""


@settings(max_examples=40, deadline=None)
@given(layout=LAYOUTS, samples=st.integers(1, 40), more=st.integers(1, 40))
def test_more_samples_never_take_less_memory(layout: dict[str, Any], samples: int, more: int) -> None:
    model, request = model_of(ROUND), _request(**layout, micro_batch_size=samples)
    fewer, larger = memory(model, request), memory(model, dataclasses.replace(request, micro_batch_size=samples + more))
    assert fewer.allocated_bytes <= larger.allocated_bytes
    assert fewer.reserved_bytes <= larger.reserved_bytes


@settings(max_examples=40, deadline=None)
@given(layout=LAYOUTS, strategy=st.sampled_from(["fsdp2", "zero3"]), samples=st.integers(1, 8))
def test_more_ranks_never_take_more_memory_where_weights_are_shared(
    layout: dict[str, Any], strategy: str, samples: int
) -> None:
    model = model_of(ROUND)
    request = _request(**layout | {"strategy": strategy}, micro_batch_size=samples)
    twice = dataclasses.replace(request, world_size=2 * request.world_size)
    assert memory(model, twice).allocated_bytes <= memory(model, request).allocated_bytes


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "fsdp1"},
        {"fused_kernels": ["norm"]},
        {"separate_experts": True},
        {"attention": "flash_attention_2", "repeated_heads": True},
    ],
)
def test_what_has_no_closed_form_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="no closed form"):
        memory(model_of(DEEP), _request(**values))


def _request(**values: Any) -> Request:
    given = {"config": DEEP, "micro_batch_size": 1, "sequence_length": 64, **values}
    return Request(**given)


def _two_ranks(config: dict[str, Any], stages: list[int], folder: Path) -> dict[str, dict[str, int]]:
    command = [sys.executable, str(HERE / "zero_bytes.py"), json.dumps(config), json.dumps(stages)]
    found: dict[str, dict[str, int]] = json.loads(run_group(command, folder)[0].splitlines()[-1])
    return found

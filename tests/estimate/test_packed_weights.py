"""Frozen 4-bit base models: what is packed, how large it is, and what stays in half precision (S1.C, S3)."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
from tracing import GPT2, LLAMA, request, trace

from trainwright.anatomy import Anatomy, anatomy, read_config
from trainwright.anatomy.quantized import nf4_bytes, quantized_matrices

MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "intermediate_size": 512,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
PACKED_ALREADY = {"quant_method": "gptq", "bits": 4, "group_size": 64}
WIDE = LLAMA | {"intermediate_size": 768}
ATTENTION = ["q_proj", "v_proj"]
QLORA: dict[str, Any] = {"type": "qlora", "r": 8, "targets": ATTENTION, "quant_storage": "uint8"}
CASES: dict[str, dict[str, Any]] = {
    "llama": request(method=QLORA, batch="full"),
    "gpt2": request(GPT2, method=QLORA | {"targets": ["c_attn"]}, batch="full"),
    "stacked experts": request(MIXTRAL, method=QLORA, batch="full"),
    "separate experts": request(MIXTRAL, method=QLORA, batch="full", separate_experts=True),
    "twice the experts": request(MIXTRAL | {"num_local_experts": 8}, method=QLORA, batch="full", separate_experts=True),
    "gptq": request(WIDE | {"quantization_config": PACKED_ALREADY}, method=QLORA, batch="full", precision="fp16"),
    "gptq, one scale a row": request(
        WIDE | {"quantization_config": PACKED_ALREADY | {"group_size": -1}},
        method=QLORA,
        batch="full",
        precision="fp16",
    ),
    "awq": request(LLAMA | {"quantization_config": {"quant_method": "awq"}}, method=QLORA),
    "as peft prepares it": request(method=QLORA | {"upcast_frozen": "peft"}, batch="full"),
    "as trl prepares it": request(method=QLORA | {"upcast_frozen": "trl"}, batch="full"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    done = trace(list(CASES.values()), tmp_path_factory.mktemp("traced"))
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


def describe(config: dict[str, Any]) -> Anatomy:
    return anatomy(read_config(config, from_scratch=True))


def base_bytes(answer: dict[str, Any]) -> int:
    """What the base model takes; adapters are fp32."""
    static: int = answer["static_bytes"]
    return static - 4 * int(answer["parameters"]["trainable"])


@pytest.mark.parametrize(("name", "config"), [("llama", LLAMA), ("gpt2", GPT2), ("stacked experts", MIXTRAL)])
def test_what_transformers_packs_is_packed_and_nothing_else(
    name: str, config: dict[str, Any], answers: dict[str, dict[str, Any]]
) -> None:
    """The very matrices that anatomy names, as in transformers; stacked experts are not among them."""
    model = describe(config)
    packed = quantized_matrices(model)
    half = model.parameter_count - sum(packed.values())
    expected = 2 * half + sum(nf4_bytes(count) for count in packed.values())
    assert base_bytes(answers[name]) == pytest.approx(expected, rel=0.001)
    assert answers[name]["parameters"]["total"] - answers[name]["parameters"]["trainable"] == model.parameter_count


def test_separate_experts_are_packed(answers: dict[str, dict[str, Any]]) -> None:
    experts = [prod(w.weight_shape()) for _, w in describe(MIXTRAL).weights() if w.kind == "experts"]
    per_expert = [
        count // 4 // split for count, split in zip(experts, (2, 1) * 2, strict=True) for _ in range(4 * split)
    ]
    saved = 2 * sum(experts) - sum(nf4_bytes(count) for count in per_expert)
    stacked, separate = answers["stacked experts"], answers["separate experts"]
    assert base_bytes(stacked) - base_bytes(separate) == pytest.approx(saved, rel=0.001)
    assert stacked["parameters"] == separate["parameters"]


def test_tokens_are_spread_over_the_experts(answers: dict[str, dict[str, Any]]) -> None:
    """Each token passes two experts, whether there are four or eight: what a step keeps stays the same."""
    four, eight = (
        answers[name]["peak"]["parts_bytes"]["activations"] for name in ("separate experts", "twice the experts")
    )
    assert eight == pytest.approx(four, rel=0.1)


def test_gptq_takes_4_bits_and_its_scales(answers: dict[str, dict[str, Any]]) -> None:
    """AutoGPTQ's QuantLinear: for each group and output a scale of 2 bytes and a zero of 4 bits; an index an input."""
    h, i, kv = 256, 768, 64
    matrices = 2 * [(h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h)]
    half = describe(WIDE).parameter_count - sum(n * m for n, m in matrices)
    for name, groups in (("gptq", lambda inputs: inputs // 64), ("gptq, one scale a row", lambda inputs: 1)):
        packed = sum(n * m // 2 + groups(n) * m * 5 // 2 + 4 * n for n, m in matrices)
        assert base_bytes(answers[name]) == pytest.approx(2 * half + packed, rel=0.001), name


def test_how_the_frozen_rest_is_prepared(answers: dict[str, dict[str, Any]]) -> None:
    """peft makes embeddings and norms fp32; trl makes the embeddings bf16 again."""
    plain, peft, trl = (base_bytes(answers[name]) for name in ("llama", "as peft prepares it", "as trl prepares it"))
    embeddings, norms = 2 * 4096 * 256, 5 * 256
    assert peft - plain == 2 * (embeddings + norms)
    assert trl - plain == 2 * norms


def test_other_packings_are_refused_by_name(answers: dict[str, dict[str, Any]]) -> None:
    assert "packed with awq are not traced" in answers["awq"]["error"]

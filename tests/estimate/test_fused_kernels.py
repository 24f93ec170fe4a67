"""Fused kernels: what a step no longer keeps; and attention of the flash-attn package, which takes no mask (S1.C)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tracing import GPT2, LLAMA, request, trace

VOCABULARY = 8192
DEEP = LLAMA | {"num_hidden_layers": 4, "vocab_size": VOCABULARY}
FULL: dict[str, Any] = {"batch": "full", "recipe": "transformers", "weights": "bf16", "autocast": False}
QLORA = {"type": "qlora", "r": 8, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"], "dropout": 0.1}
WINDOWED = DEEP | {"model_type": "mistral", "sliding_window": 128}
FLASH = {**FULL, "attention": "flash_attention_2"}

CASES: dict[str, dict[str, Any]] = {
    "plain": request(DEEP, **FULL),
    "norm": request(DEEP, **FULL, fused_kernels=["norm"]),
    "rotary": request(DEEP, **FULL, fused_kernels=["rotary"]),
    "mlp": request(DEEP, **FULL, fused_kernels=["mlp"]),
    "loss": request(DEEP, **FULL, fused_kernels=["loss"]),
    "output_loss": request(DEEP, **FULL, fused_kernels=["output_loss"]),
    "plain again": request(DEEP, **FULL),
    "qlora": request(DEEP, **FULL, method=QLORA),
    "qlora, fused": request(DEEP, **FULL, method=QLORA, fused_kernels=["lora"]),
    "without adapters": request(DEEP, **FULL, fused_kernels=["lora"]),
    "no norm to fuse": request(GPT2, **FULL, fused_kernels=["norm"]),
    "flash, window": request(WINDOWED, **FLASH),
    "flash": request(WINDOWED | {"sliding_window": None}, **FLASH),
    "flash, repeated heads": request(WINDOWED, **FLASH, repeated_heads=True),
}
LOGITS = 2 * 128 * VOCABULARY


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    done = trace(list(CASES.values()), tmp_path_factory.mktemp("traced"))
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


def part(answer: dict[str, Any], name: str) -> int:
    found: int = answer["peak"]["parts_bytes"].get(name, 0)
    return found


def highest(answer: dict[str, Any], phase: str) -> int:
    return max(int(p["requested_bytes"]) for p in answer["phases"] if p["phase"] == phase)


def test_a_fused_loss_keeps_no_probabilities(answers: dict[str, dict[str, Any]]) -> None:
    """Unfused: the log-softmax of fp32 logits, and two gradients of them. Fused: the logits become their gradient."""
    assert highest(answers["plain"], "backward") - highest(answers["loss"], "backward") >= 4 * LOGITS


def test_a_loss_in_the_output_layer_never_has_all_logits(answers: dict[str, dict[str, Any]]) -> None:
    assert part(answers["plain"], "logits and loss") >= 8 * LOGITS
    assert part(answers["output_loss"], "logits and loss") < LOGITS


@pytest.mark.parametrize("name", ["norm", "rotary", "mlp"])
def test_fused_layers_keep_less(name: str, answers: dict[str, dict[str, Any]]) -> None:
    assert highest(answers[name], "forward") < highest(answers["plain"], "forward")


def test_fused_lora_keeps_one_input_for_three_layers(answers: dict[str, dict[str, Any]]) -> None:
    assert highest(answers["qlora, fused"], "forward") < highest(answers["qlora"], "forward")
    assert answers["qlora, fused"]["parameters"] == answers["qlora"]["parameters"]


def test_the_next_request_is_not_fused(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["plain again"] == answers["plain"]


@pytest.mark.parametrize("name", ["without adapters", "no norm to fuse"])
def test_what_cannot_be_fused_is_refused(name: str, answers: dict[str, dict[str, Any]]) -> None:
    assert answers[name]["error"].startswith("fused_kernels: no fused kernel replaces")


def test_all_that_is_wrong_with_the_parts_is_said(tmp_path: Path) -> None:
    done = trace(request(fused_kernels=["rope", "loss"], repeated_heads=True), tmp_path, check=False)
    no_flash, unknown, own_loss = json.loads(done.stdout)["problems"]
    assert no_flash == "repeated_heads: is for the attention flash_attention_2"
    assert "there are norm, rotary, mlp, loss, output_loss, lora" in unknown
    assert "the workers have a loss of their own" in own_loss


def test_repeated_heads_are_kept_for_the_backward_pass(answers: dict[str, dict[str, Any]]) -> None:
    """Keys and values of every layer: 8 heads of 32 in bf16 instead of 2, for 256 tokens."""
    more = highest(answers["flash, repeated heads"], "forward") - highest(answers["flash"], "forward")
    assert more == 4 * 2 * (8 - 2) * 32 * 2 * 256


def test_flash_attention_2_makes_no_mask_for_a_window(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["flash, window"]["phases"] == answers["flash"]["phases"]
    assert answers["flash"]["attention_kernels"] == {}

"""`python -m trainwright.estimate.trace.answer`: what it answers, and how it says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tracing import LLAMA, T5, request, trace

from trainwright.errors import ExitCode, UserError
from trainwright.estimate.trace.versions import SUPPORTED_TORCH, require_internals

DEEP = LLAMA | {"num_hidden_layers": 12}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 128, "num_experts_per_tok": 2, "head_dim": 32}
DEEP_EXPERTS = DEEP | EXPERTS | {"model_type": "qwen3_moe"}
LORA_TWICE: dict[str, Any] = {"method": {"type": "lora", "r": 8}, "gradient_accumulation_steps": 2}
SHARDED: dict[str, Any] = {"strategy": "fsdp2", "world_size": 4, "gradient_accumulation_steps": 2}
CHECKPOINTED = {"gradient_checkpointing": "non_reentrant", "batch": "full"}
SEQ2SEQ: dict[str, Any] = {"auto_class": "AutoModelForSeq2SeqLM"}

CASES: dict[str, dict[str, Any]] = {
    "full": request(batch="full"),
    "again": request(batch="full"),
    "checkpointed": request(**CHECKPOINTED),
    "lora": request(batch="full", method={"type": "lora", "r": 8}),
    "qlora": request(batch="full", method={"type": "qlora", "r": 8}),
    "8-bit optimizer": request(batch="full", optimizer="adamw_8bit"),
    "padded": request(batch="padded"),
    "padded, no mask": request(batch="padded", padding_mask=False),
    "eager": request(batch="full", attention="eager"),
    "deep, expandable": request(DEEP, **CHECKPOINTED, expandable_segments=True),
    "too small": request(batch="full", capacity_bytes=32 << 20),
    "accumulated": request(batch="full", gradient_accumulation_steps=3),
    "deep": request(DEEP, **CHECKPOINTED),
    "deep experts, lora": request(DEEP_EXPERTS, **CHECKPOINTED, **LORA_TWICE),
    "deep, sharded and accumulated": request(DEEP, **SHARDED),
    "layers that no pattern tells": request(DEEP_EXPERTS | {"mlp_only_layers": [7]}, batch="full"),
    "fp16": request(batch="full", precision="fp16"),
    "evaluated": request(T5, **SEQ2SEQ, evaluation_batch_size=6),
    "hopper": request(batch="full", compute_capability=[9, 0]),
    "unknown model": request({"model_type": "not-a-model"}),
    "impossible model": request(LLAMA | {"hidden_size": 255}),
    "impossible targets": request(method={"type": "lora", "targets": ["no_such_module"]}),
}
TWO_DEPTHS = ["deep", "deep experts, lora", "deep, sharded and accumulated", "layers that no pattern tells"]
CASES |= {f"{name}, two depths": CASES[name] | {"two_depths": True} for name in TWO_DEPTHS}
IMPOSSIBLE = {
    "unknown model": "knows no `not-a-model`",
    "impossible model": "The hidden size (255) is not a multiple",
    "impossible targets": "method.targets: Target modules {'no_such_module'} not found",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    done = trace(list(CASES.values()), tmp_path_factory.mktemp("traced"))
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


def peak(answer: dict[str, Any]) -> int:
    allocated: int = answer["peak"]["allocated_bytes"]
    return allocated


def parts(answer: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = answer["peak"]["parts_bytes"]
    return found


def test_same_request_gives_the_same_bytes(answers: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    assert json.dumps(answers["full"]) == json.dumps(answers["again"])
    alone = json.loads(trace(CASES["full"], tmp_path).stdout)
    assert json.dumps(alone) == json.dumps(answers["full"])


def test_parts_add_up_to_what_is_reserved(answers: dict[str, dict[str, Any]]) -> None:
    for name in CASES.keys() - set(IMPOSSIBLE):
        figures = answers[name]["peak"]
        assert sum(figures["parts_bytes"].values()) == figures["reserved_bytes"], name
        assert figures["allocated_bytes"] <= figures["reserved_bytes"], name


def test_full_training_keeps_weights_moments_and_gradients_in_fp32(answers: dict[str, dict[str, Any]]) -> None:
    full = answers["full"]
    parameters = full["parameters"]["total"]
    assert full["static_bytes"] == pytest.approx(4 * parameters, rel=0.01)
    assert parts(full)["weights"] == pytest.approx(4 * parameters, rel=0.01)
    assert parts(full)["optimizer"] == pytest.approx(8 * parameters, rel=0.01)
    accumulated = parts(answers["accumulated"])
    assert accumulated["gradients"] == pytest.approx(4 * parameters, rel=0.01)


def test_lora_keeps_a_bf16_base_with_fp32_adapters(answers: dict[str, dict[str, Any]]) -> None:
    lora = answers["lora"]
    base, trained = lora["parameters"]["total"] - lora["parameters"]["trainable"], lora["parameters"]["trainable"]
    assert parts(lora)["weights"] == pytest.approx(2 * base, rel=0.01)
    assert parts(lora)["adapters"] == 4 * trained
    assert parts(lora)["optimizer"] == pytest.approx(8 * trained, rel=0.05)
    assert peak(lora) < peak(answers["full"])


def test_qlora_packs_all_but_the_embeddings(answers: dict[str, dict[str, Any]]) -> None:
    """4 bits and 1/64 of a byte of scales for each packed weight, 16 bits for the rest."""
    qlora, lora = answers["qlora"], answers["lora"]
    assert qlora["parameters"] == lora["parameters"]
    embeddings = 2 * LLAMA["vocab_size"] * LLAMA["hidden_size"]
    packed = qlora["parameters"]["total"] - qlora["parameters"]["trainable"] - embeddings
    expected = 2 * embeddings + packed * (1 / 2 + 1 / 64)
    assert parts(qlora)["weights"] == pytest.approx(expected, rel=0.02)


def test_checkpointing_trades_activations_for_recomputation(answers: dict[str, dict[str, Any]]) -> None:
    assert parts(answers["checkpointed"])["activations"] < parts(answers["full"])["activations"] / 3


def test_8_bit_moments_take_a_quarter(answers: dict[str, dict[str, Any]]) -> None:
    in_fp32 = parts(answers["full"])["optimizer"]
    assert parts(answers["8-bit optimizer"])["optimizer"] == pytest.approx(in_fp32 / 4, rel=0.1)


def test_attention_kernel_follows_from_the_batch(answers: dict[str, dict[str, Any]]) -> None:
    """Flash attention takes no mask: a padded batch falls back to the memory-efficient kernel, as on a GPU."""
    assert answers["full"]["attention_kernels"].keys() == {"flash"}
    assert answers["padded"]["attention_kernels"].keys() == {"efficient"}
    assert answers["padded, no mask"]["attention_kernels"].keys() == {"flash"}
    assert peak(answers["padded, no mask"]) < peak(answers["full"]) < peak(answers["padded"])
    assert answers["eager"]["attention_kernels"] == {}
    assert peak(answers["eager"]) > peak(answers["full"])


def test_expandable_segments_leave_less_unused(answers: dict[str, dict[str, Any]]) -> None:
    fixed, expandable = answers["deep"]["peak"], answers["deep, expandable"]["peak"]
    assert expandable["allocated_bytes"] <= fixed["allocated_bytes"]  # smaller rests are split off
    assert expandable["reserved_bytes"] < fixed["reserved_bytes"]


def test_what_does_not_fit_is_said(answers: dict[str, dict[str, Any]]) -> None:
    small = answers["too small"]["peak"]
    assert small["out_of_memory"] and small["retries"] > 0
    assert not answers["full"]["peak"]["out_of_memory"]


@pytest.mark.parametrize("name", TWO_DEPTHS)
def test_two_depths_give_the_bytes_of_all_layers(name: str, answers: dict[str, dict[str, Any]]) -> None:
    """To the last byte, reserved memory too: the records of further layers are those that their own trace gives."""
    deep, continued = answers[name], answers[f"{name}, two depths"]
    for figure in ("peak", "phases", "parameters", "static_bytes", "attention_kernels"):
        assert continued[figure] == deep[figure], figure


def test_layers_that_no_pattern_tells_are_all_traced(answers: dict[str, dict[str, Any]]) -> None:
    assert answers["deep, two depths"]["depths"] == {"traced": [3, 4], "full": 12}
    assert answers["deep, two depths"]["operators"] < answers["deep"]["operators"]
    assert "depths" in answers["deep experts, lora, two depths"]
    assert "depths" not in answers["layers that no pattern tells, two depths"]


def test_evaluation_has_its_own_peak(answers: dict[str, dict[str, Any]]) -> None:
    evaluation = answers["evaluated"]["evaluation"]
    assert evaluation["requested_bytes"] > answers["evaluated"]["static_bytes"]
    assert "activations" not in evaluation["parts_bytes"]
    assert "gradients" not in evaluation["parts_bytes"]


def test_hopper_takes_larger_workspaces(answers: dict[str, dict[str, Any]]) -> None:
    """Two handles, one for each direction: 8,320 KiB each before Hopper, 32 MiB on it."""
    assert parts(answers["full"])["workspaces"] == 2 * 8320 * 1024
    assert parts(answers["hopper"])["workspaces"] == 2 * 32 * 1024 * 1024


@pytest.mark.parametrize(("name", "message"), IMPOSSIBLE.items())
def test_a_request_that_fails_does_not_take_the_others_with_it(
    name: str, message: str, answers: dict[str, dict[str, Any]]
) -> None:
    assert message in answers[name]["error"]


def test_all_problems_of_a_request_are_said_at_once(tmp_path: Path) -> None:
    asked = request(micro_batch=4, strategy="single", method={"type": "full", "rank": 3})
    done = trace(asked, tmp_path, check=False)
    assert done.returncode == ExitCode.USAGE
    problems = json.loads(done.stdout)["problems"]
    assert any(problem.startswith("micro_batch: is not known") for problem in problems)
    assert any(problem.startswith("method.rank: is not known") for problem in problems)
    asked = request(strategy="zero9", world_size=0, learned_share=0.0)
    problems = json.loads(trace(asked, tmp_path, check=False).stdout)["problems"]
    assert {problem.split(":")[0] for problem in problems} == {"strategy", "world_size", "learned_share"}


def test_this_torch_has_the_internals() -> None:
    require_internals()


def test_a_torch_without_them_is_refused_with_those_that_have_them() -> None:
    with pytest.raises(UserError) as caught:
        require_internals(("torch:Tensor.no_such_internal", "torch.no_such_module:thing", "torch:Tensor.to"))
    assert caught.value.exit_code == ExitCode.MISSING
    assert len(caught.value.problems) == 2
    assert all(version in caught.value.render() for version in SUPPORTED_TORCH)

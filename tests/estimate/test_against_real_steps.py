"""Issue "does it fit", benchmark 4: a traced step against the same step on real CPU tensors, and against the workers.

Real tensors pass through the same tracker, so that this checks the bookkeeping, the model and the step: what fake
tensors and their answers change. Kernels of CUDA are not checked here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tracing import BERT, GPT2, LLAMA, T5, phases, really_run, request, trace

CPU: dict[str, Any] = {"device": "cpu"}
LORA = {"method": {"type": "lora", "r": 8, "dropout": 0.1}}
TRAINER: dict[str, Any] = {"recipe": "transformers", "weights": "bf16", "autocast": False, "optimizer": "adamw_foreach"}
SEQ2SEQ: dict[str, Any] = {"auto_class": "AutoModelForSeq2SeqLM", "target_length": 64}

EXPERTS: dict[str, Any] = LLAMA | {"model_type": "qwen3_moe", "head_dim": 32, "num_experts": 4}
EXPERTS |= {"moe_intermediate_size": 128, "num_experts_per_tok": 2}

CASES: dict[str, dict[str, Any]] = {
    "llama full, autocast": request(**CPU),
    "llama full, packed, checkpointed, accumulated": request(
        **CPU, batch="packed", gradient_checkpointing="non_reentrant", gradient_accumulation_steps=2
    ),
    "llama lora with dropout": request(**CPU, **LORA),
    "llama lora, reentrant, pure bf16 (Trainer)": request(
        **CPU, **LORA, **TRAINER, gradient_checkpointing="reentrant", batch="full"
    ),
    "experts full, in fp32": request(EXPERTS, **CPU),
    "gpt2 fp32, long": request(GPT2, **CPU, precision="fp32", batch="full", sequence_length=256),
    "t5 full": request(T5, **CPU, **SEQ2SEQ),
    "t5 adafactor, fp32": request(T5, **CPU, **SEQ2SEQ, optimizer="adafactor", precision="fp32"),
    "bert masked, one tensor at a time (Trainer)": request(
        BERT, **CPU, **TRAINER | {"optimizer": "adamw_loop"}, auto_class="AutoModelForMaskedLM"
    ),
}
BY_WORKERS = [
    "llama full, autocast",
    "llama full, packed, checkpointed, accumulated",
    "llama lora with dropout",
    "t5 full",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def traced(folder: Path) -> dict[str, dict[str, int]]:
    answers = json.loads(trace(list(CASES.values()), folder).stdout)
    return {name: phases(answer) for name, answer in zip(CASES, answers, strict=True)}


@pytest.fixture(scope="module")
def real(folder: Path) -> dict[str, dict[str, int]]:
    by_workers = [CASES[name] | {"workers_code": True} for name in BY_WORKERS]
    found = really_run([*CASES.values(), *by_workers], folder)
    return dict(zip([*CASES, *(f"workers: {name}" for name in BY_WORKERS)], found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_peak_of_a_traced_step_is_within_1_pct_of_a_real_one(
    name: str, traced: dict[str, dict[str, int]], real: dict[str, dict[str, int]]
) -> None:
    assert traced[name]["static"] == real[name]["static"]
    assert traced[name].keys() == real[name].keys()
    for phase, peak in real[name].items():
        assert traced[name][phase] == pytest.approx(peak, rel=0.01), phase


@pytest.mark.parametrize("name", BY_WORKERS)
def test_traced_step_is_that_of_the_workers(
    name: str, traced: dict[str, dict[str, int]], real: dict[str, dict[str, int]]
) -> None:
    """The recipe repeats the workers' step in code of its own, which must not drift from theirs."""
    workers = real[f"workers: {name}"]
    assert traced[name].keys() == workers.keys()
    for phase, peak in workers.items():
        assert traced[name][phase] == pytest.approx(peak, rel=0.01), phase


def test_models_of_these_cases_are_small_but_not_all_alike(traced: dict[str, dict[str, int]]) -> None:
    """Guards the tests above: peaks that are all alike, or all static, would prove nothing."""
    highest = {name: max(found.values()) for name, found in traced.items()}
    assert len(set(highest.values())) == len(CASES)
    assert all(peak > 1.2 * traced[name]["static"] for name, peak in highest.items())
    assert LLAMA["num_hidden_layers"] == 2

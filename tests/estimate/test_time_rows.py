"""Published rows as steps: units, corrections and reasons of `benchmarks/published/time.py`, on rows made up here."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MPT = {
    "source": "github.com/mosaicml/llm-foundry scripts/train/benchmarking/README.md",
    "model": "MPT-1b",
    "params": "1.3e9",
    "method": "full",
    "lora_rank": "",
    "lora_targets": "",
    "optimizer": "decoupled_adamw",
    "precision": "amp_bf16 DEFAULT",
    "seq_len": "2048",
    "micro_batch": "8",
    "grad_accum": "2.0",
    "grad_ckpt": "false",
    "strategy": "fsdp1_full_shard",
    "gpu": "a100_80gb",
    "world_size": "8.0",
    "peak_mem_gib": "",
    "mem_kind": "",
    "tokens_per_s": "160000",
    "mfu": "",
    "notes": "tps_unit=system",
}
BERT = MPT | {
    "source": "github.com/lambdal/deeplearning-benchmark pytorch/results",
    "model": "bert-base-uncased SQuAD",
    "precision": "apex O2 fp16",
    "seq_len": "384",
    "micro_batch": "52",
    "grad_accum": "1.0",
    "strategy": "ddp",
    "gpu": "RTX A5500",
    "tokens_per_s": "600000",
    "notes": "dir=results/8xA5500/PyTorch_bert_base_squad_FP16/x; tps_unit=system",
}
QLORA = MPT | {
    "source": "github.com/AnswerDotAI/fsdp_qlora benchmarks_03_2024.md",
    "model": "Llama-2 7B",
    "method": "qlora",
    "grad_accum": "",
    "gpu": "RTX 3090 (280W)",
    "world_size": "2.0",
    "micro_batch": "4",
    "tokens_per_s": "",
    "notes": "time_s=1000 for 1024 samples; per-GPU batch",
}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published.time")


def only(timed: ModuleType, record: dict[str, str]) -> dict[str, Any]:
    rows, skipped = timed.time_rows([record])
    assert not skipped
    (row,) = rows
    return dict(row)


def test_tokens_a_second_of_the_system_become_seconds_of_a_step(timed: ModuleType) -> None:
    row = only(timed, MPT)
    assert row["measured_s"] == pytest.approx(8 * 8 * 2 * 2048 / 160000)
    assert row["slice"] == "sharded"
    assert row["error_pct"] == pytest.approx(100 * (row["predicted_s"] / row["measured_s"] - 1))
    assert row["low_s"] < row["predicted_s"] < row["high_s"]


def test_sequences_that_were_never_trained_are_not_counted(timed: ModuleType) -> None:
    """run_squad.py divides 1000 steps by the time, though two epochs of 8 x 52 sequences end after 428."""
    apparent_s = 8 * 52 * 384 / 600000
    assert only(timed, BERT)["measured_s"] == pytest.approx(apparent_s * 1000 / 428, rel=1e-3)
    two = BERT | {"world_size": "2.0", "notes": BERT["notes"].replace("8x", "2x")}
    assert only(timed, two)["measured_s"] == pytest.approx(2 * 52 * 384 / 600000)


def test_seconds_of_all_samples_become_seconds_of_a_step(timed: ModuleType) -> None:
    assert only(timed, QLORA)["measured_s"] == pytest.approx(1000 / (1024 / (4 * 2)))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (MPT | {"tokens_per_s": ""}, "no time was recorded"),
        (MPT | {"micro_batch": "?"}, "micro_batch is not a whole number"),
        (MPT | {"precision": "amp_fp8 DEFAULT"}, "fp8"),
        (MPT | {"gpu": "RTX 3080 Max-Q 16GB (laptop)"}, "not in the catalogue: RTX 3080 Max-Q"),
        (QLORA | {"notes": "time_s=1000 for 1024 samples; cpu_offload"}, "host memory"),
        (MPT | {"source": "example.org/unknown"}, "not described"),
    ],
)
def test_a_row_is_left_out_for_what_its_columns_say(timed: ModuleType, record: dict[str, str], reason: str) -> None:
    """Never for its error: the measured figure plays no part."""
    rows, skipped = timed.time_rows([record])
    assert not rows
    assert list(skipped.values()) == [1] and reason in next(iter(skipped))

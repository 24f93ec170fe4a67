"""`benchmarks/published_rows.py` on a file of its own: what it answers, and what it leaves out for which reason."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FMS = "github.com/foundation-model-stack/fms-acceleration"
ROW = {
    "source": FMS,
    "model": "HuggingFaceTB/SmolLM2-135M",
    "params": "135000000.0",
    "method": "full",
    "lora_rank": "",
    "lora_targets": "",
    "optimizer": "adamw_torch (HF default)",
    "precision": "bfloat16",
    "seq_len": "64",
    "micro_batch": "1",
    "grad_accum": "1.0",
    "grad_ckpt": "true",
    "strategy": "single",
    "gpu": "A100-80GB",
    "world_size": "1.0",
    "peak_mem_gib": "1.3",
    "mem_kind": "torch_allocated_peak",
    "tokens_per_s": "",
    "mfu": "",
    "notes": "file=a.csv@1; framework_config=none; nvidia_smi_mib=2048",
}
LORA = {"method": "lora", "lora_rank": "8", "lora_targets": "q_proj v_proj"}
OOM = {"peak_mem_gib": "", "mem_kind": "", "seq_len": "", "notes": "file=a.csv@1; OUTCOME=OOM (last reading)"}

TRACED: list[dict[str, str]] = [
    {},
    LORA | {"peak_mem_gib": "0.4"},
    LORA | {"strategy": "fsdp1_full_shard", "world_size": "2.0", "peak_mem_gib": "0.3"},
]
OUT_OF_MEMORY: list[dict[str, str]] = [
    OOM | {"model": "Llama 2 70B"},  # its weights exceed the card
    OOM | {"micro_batch": "2048"},  # its logits do
]
LEFT_OUT: dict[str, dict[str, str]] = {
    "unknown source: what its training program does is not described": {"source": "example.org/somebody"},
    "no memory figure": {"peak_mem_gib": ""},
    "peak_mem_gib is no number above zero": {"peak_mem_gib": "lots"},
    "unknown kind of memory figure: `guess`": {"mem_kind": "guess"},
    "unknown method: `distillation`": {"method": "distillation"},
    "seq_len is missing": {"seq_len": ""},
    "micro_batch is no whole number above zero": {"micro_batch": "-2.5"},
    "grad_accum is no whole number above zero": {"grad_accum": "nan"},
    "world_size is no whole number above zero": {"world_size": "inf"},
    "lora_rank is missing": LORA | {"lora_rank": ""},
    "lora_targets is missing": LORA | {"lora_targets": ""},
    "unknown model: somebody/new-model-9b": {"model": "somebody/new-model-9b"},
    "unknown precision: `int3`": {"precision": "int3"},
    "unknown strategy: `tp8`": {"strategy": "tp8"},
    "unknown grad_ckpt: `maybe`": {"grad_ckpt": "maybe"},
    "unknown optimizer: lion": {"optimizer": "lion"},
    "unknown configuration of plugins: new-plugin": {"notes": "framework_config=new-plugin"},
    "out of memory on an unknown GPU: X900": OOM | {"gpu": "X900", "notes": "file=a.csv@1; OUTCOME=OOM"},
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    rows = [*TRACED, *OUT_OF_MEMORY, *LEFT_OUT.values()]
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*ROW, "a column that nobody knows"])
        writer.writeheader()
        writer.writerows(ROW | row for row in rows)
        file.write(f"{FMS},a row that ends early\n")
    found: dict[str, Any] = json.loads(run(path, "--json").stdout)
    return found


def run(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "published_rows.py"), "--rows", str(path), *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_rows_of_known_configuration_are_compared(report: dict[str, Any]) -> None:
    """Weights, gradients and moments of 134.5 M parameters in bf16 are 1.0 GiB; with adapters only the weights are."""
    full, lora, sharded = (row for row in report["memory_rows"] if not row["ran_out_of_memory"])
    parameters_gib = 134_515_008 * 2 / (1 << 30)
    assert full["predicted_gib"]["torch_allocated"] == pytest.approx(5 * parameters_gib, rel=0.05)
    assert lora["predicted_gib"]["torch_allocated"] < 2 * parameters_gib
    assert sharded["predicted_gib"]["torch_allocated"] < lora["predicted_gib"]["torch_allocated"]
    for row in (full, lora, sharded):
        predicted, measured = row["predicted_gib"], row["measured_gib"]
        assert predicted["torch_allocated"] < predicted["torch_reserved"] < predicted["nvidia_smi"]
        assert measured["nvidia_smi"] == 2.0
        for kind, error in row["error_pct"].items():
            assert error == pytest.approx(100 * (predicted[kind] / measured[kind] - 1))


def test_slices_hold_every_row_once(report: dict[str, Any]) -> None:
    slices = {found["name"]: found for found in report["memory"]}
    assert [found["name"] for found in report["memory"]][:4] == ["full", "lora", "sharded", "all"]
    assert {name: found["rows"] for name, found in slices.items()} == {
        "full": 1,
        "lora": 1,
        "sharded": 1,
        "all": 3,
        "torch_allocated": 3,
        "nvidia_smi": 3,
        "foundation-model-stack/fms-acceleration": 3,
    }
    errors = [row["error_pct"]["torch_allocated"] for row in report["memory_rows"] if row["error_pct"]]
    assert slices["all"]["median_abs_pct"] == sorted(map(abs, errors))[1]
    assert slices["all"]["p95_abs_pct"] == max(map(abs, errors))
    assert slices["all"]["under_5_pct_share"] == sum(error < -5 for error in errors) / 3


def test_rows_that_ran_out_of_memory_are_asked_whether_they_fit(report: dict[str, Any]) -> None:
    """They have no length of their own: the rows beside them have one."""
    assert report["oom"] == {"rows": 2, "right": 2}
    assert report["fits"] == {"rows": 3, "right": 3}


def test_what_is_left_out_is_counted_by_its_reason(report: dict[str, Any]) -> None:
    """Whatever a row says or lacks: it never stops the run."""
    found = {key.removeprefix("memory: "): count for key, count in report["skipped"].items() if "memory: " in key}
    assert found == dict.fromkeys(LEFT_OUT, 1) | {"no memory figure": 2}  # and the row that ends early


def test_a_row_is_traced_by_the_interpreter_with_its_version_of_transformers(tmp_path: Path) -> None:
    """Played by one that says it has 4.45.2, and notes that it traces."""
    other, traced = tmp_path / "python", tmp_path / "traced"
    other.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo 4.45.2 && exit\ntouch {traced}\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    interpreters = ("--python", sys.executable, "--python", str(other))
    by_file = {}
    for file in ("a100_80gb.csv", "a100_80gb_liger.csv"):
        path = tmp_path / file
        with path.open("w", newline="") as rows:
            writer = csv.DictWriter(rows, list(ROW))
            writer.writeheader()
            writer.writerow(ROW | {"notes": f"file=refs/{file}@1; framework_config=none; nvidia_smi_mib=2048"})
        (row,) = json.loads(run(path, "--json", *interpreters).stdout)["memory_rows"]
        by_file[file] = traced.exists(), row["predicted_gib"]["torch_allocated"]
    (first, of_448), (second, of_445) = by_file.values()
    assert (first, second) == (False, True)
    assert of_448 == pytest.approx(of_445, rel=0.1)


def test_time_is_reported_in_the_same_way(report: dict[str, Any]) -> None:
    rows = len(TRACED) + len(OUT_OF_MEMORY) + len(LEFT_OUT) + 1
    untimed = sum(count for reason, count in report["skipped"].items() if reason.startswith("time: "))
    assert len(report["time_rows"]) + untimed == rows
    assert isinstance(report["time"], list)


def test_a_file_with_nothing_to_answer_gives_empty_tables(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text(",".join(ROW) + "\n")
    found = json.loads(run(path, "--json").stdout)
    assert (found["memory"], found["time"], found["skipped"]) == ([], [], {})
    assert found["oom"] == {"rows": 0, "right": 0}
    assert "ran out of memory" in run(path).stdout

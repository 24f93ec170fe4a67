"""The traced step against published peaks: rows of fms-acceleration, measured on A100-80GB GPUs.

    python benchmarks/trace_rows.py --rows published.csv [--python ENVIRONMENT/bin/python] [--json]

`--rows` has the columns source, model, method, lora_rank, lora_targets, optimizer, precision, seq_len, micro_batch,
grad_accum, grad_ckpt, strategy, world_size, peak_mem_gib, mem_kind, notes. `--python` runs the trace with the library
versions of another environment, such as those that the source names (transformers 4.48.1, peft 0.13.2,
accelerate 1.0.1). What no column says is that source's benchmark script, scripts/benchmarks at 876e2ed: flash-attn,
reentrant checkpointing, packed samples of one length, LoRA dropout 0.1. A row that is left out is counted with its
reason, found before anything is traced.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

SOURCE = "github.com/foundation-model-stack/fms-acceleration"
GIB = 1 << 30
TOGETHER = 6
"""Rows traced in one process."""
CONTEXT_GIB = 0.5
"""Of a CUDA context on an A100; for the column that compares reserved memory with nvidia-smi, and for what is left."""
CARD_GIB = 79.15
"""Of an A100-80GB, as torch's out-of-memory messages give it ("a total capacity of 79.15 GiB")."""

_MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
}
CONFIGS = {
    "mistralai/Mistral-7B-v0.1": _MISTRAL,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _MISTRAL
    | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "NousResearch/Llama-2-70b-hf": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
}


@dataclass(frozen=True)
class Row:
    """A published row, the request it becomes, and what was measured."""

    name: str
    slice: str
    request: dict[str, Any]
    measured_gib: float
    nvidia_smi_gib: float | None


def main() -> int:
    """Print the errors of all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows, skipped = read_rows(arguments.rows)
    rows = [row for row in rows if arguments.only in row.name]
    answers = trace_all([row.request for row in rows], arguments.python)
    figures = [compare(row, answer) for row, answer in zip(rows, answers, strict=True)]
    versions = next((answer["versions"] for answer in answers if "versions" in answer), {})
    if arguments.json:
        json.dump({"versions": versions, "memory": slices(figures), "rows": figures, "skipped": skipped}, sys.stdout)
        print()
        return 0
    show(figures, skipped, versions)
    return 0


def read_rows(path: Path) -> tuple[list[Row], dict[str, int]]:
    """Return the rows that can be traced, and for the others of this source how many for which reason."""
    rows, skipped = [], Counter[str]()
    with path.open(newline="") as file:
        for record in csv.DictReader(file):
            if record["source"] != SOURCE or not record["mem_kind"].startswith("torch_allocated"):
                continue
            reason = why_not(record)
            if reason is not None:
                skipped[reason] += 1
                continue
            rows.append(as_row(record))
    return rows, dict(skipped)


def why_not(record: dict[str, str]) -> str | None:
    """Return why a row cannot be traced, by its configuration alone."""
    framework = note(record, "framework_config") or ""
    if not record["peak_mem_gib"]:
        return "no peak was recorded (out of memory)"
    if "foak" in framework or "liger" in framework:
        return "fused kernels that no traced library has (foak, liger)"
    if "gptq" in framework or "GPTQ" in record["model"]:
        return "GPTQ base model: its kernels are not traced"
    if record["model"] not in CONFIGS:
        return f"no config at hand for {record['model']}"
    return None


def as_row(record: dict[str, str]) -> Row:
    """Turn a row into a request."""
    framework = note(record, "framework_config") or ""
    method, strategy = record["method"], "fsdp1" if record["strategy"].startswith("fsdp1") else "single"
    world_size, micro_batch = int(float(record["world_size"])), int(float(record["micro_batch"]))
    how: dict[str, Any] = {"type": method}
    if method != "full":
        how |= {"r": int(float(record["lora_rank"])), "alpha": 16.0, "dropout": 0.1}
        how |= {"targets": [name for name in record["lora_targets"].split() if name != "c_attn"]}
    if method == "qlora":
        how |= {"quant_storage": "bf16" if strategy == "fsdp1" else "uint8"}
        how |= {"upcast_frozen": framework.startswith("baseline") and strategy == "single"}
    request = {
        "config": CONFIGS[record["model"]],
        "recipe": "transformers",
        "method": how,
        "weights": "bf16",
        "autocast": "autocast" in record["precision"],
        "optimizer": "adamw_foreach",
        "micro_batch_size": micro_batch,
        "sequence_length": int(float(record["seq_len"])),
        "batch": "full",
        "gradient_accumulation_steps": int(float(record["grad_accum"])),
        "gradient_checkpointing": "reentrant" if record["grad_ckpt"] == "true" else "none",
        "attention": "flash_attention_2",
        "strategy": strategy,
        "world_size": world_size,
        "capacity_bytes": int((CARD_GIB - CONTEXT_GIB) * GIB),
    }
    name = f"{record['model'].split('/')[-1]} {method} {framework} b{micro_batch} {strategy} x{world_size}"
    smi = note(record, "nvidia_smi_mib")
    part = "sharded" if world_size > 1 else method
    return Row(name, part, request, float(record["peak_mem_gib"]), float(smi) / 1024 if smi else None)


def note(record: dict[str, str], key: str) -> str | None:
    """Return one `key=value` of a row's notes."""
    found = re.search(rf"\b{key}=([^;]*)", record["notes"])
    return found.group(1).strip() if found else None


def trace_all(requests: list[dict[str, Any]], python: str) -> list[dict[str, Any]]:
    """Trace in processes of another interpreter, a few requests each, so that its imports are shared."""
    answers: list[dict[str, Any]] = []
    for begin in range(0, len(requests), TOGETHER):
        answers += trace_some(requests[begin : begin + TOGETHER], python)
        print(f"{len(answers)} of {len(requests)} rows traced", file=sys.stderr)
    return answers


def trace_some(requests: list[dict[str, Any]], python: str) -> list[dict[str, Any]]:
    """Trace in one process."""
    source = Path(__file__).parents[1] / "src"
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(requests, file)
        file.flush()
        command = [python, "-m", "trainwright.estimate.trace", file.name]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def compare(row: Row, answer: dict[str, Any]) -> dict[str, Any]:
    """Return measured and predicted figures of a row in GiB, and the errors in percent."""
    figures: dict[str, Any] = {"row": row.name, "slice": row.slice, "measured_gib": row.measured_gib}
    if "error" in answer:
        return figures | {"failed": answer["error"]}
    peak = answer["peak"]
    allocated, reserved = peak["allocated_bytes"] / GIB, peak["reserved_bytes"] / GIB
    figures |= {
        "predicted_gib": allocated,
        "error_pct": 100 * (allocated / row.measured_gib - 1),
        "phase": f"{peak['phase']} {peak['operator']}",
        "parts_gib": {part: size / GIB for part, size in peak["parts_bytes"].items()},
        "nvidia_smi_gib": row.nvidia_smi_gib,
        "predicted_reserved_gib": reserved,
        "retries": peak["retries"],
    }
    if row.nvidia_smi_gib is not None:
        figures["reserved_error_pct"] = 100 * ((reserved + CONTEXT_GIB) / row.nvidia_smi_gib - 1)
    return figures


def slices(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the spread of the errors by slice."""
    found = []
    for name in ("full", "lora", "qlora", "sharded", "all"):
        errors = [f["error_pct"] for f in figures if "error_pct" in f and name in (f["slice"], "all")]
        if errors:
            ranked = sorted(abs(error) for error in errors)
            found.append(
                {
                    "name": name,
                    "rows": len(errors),
                    "median_abs_pct": median(ranked),
                    "p95_abs_pct": ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))],
                    "under_5_pct_share": sum(error < -5 for error in errors) / len(errors),
                }
            )
    return found


def show(figures: list[dict[str, Any]], skipped: dict[str, int], versions: dict[str, str]) -> None:
    """Print the table."""
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{'row':66} {'measured':>9} {'traced':>9} {'error':>8} {'with context':>12} {'smi':>7} {'error':>7}  at")
    for f in figures:
        if "failed" in f:
            print(f"{f['row']:66} {f['measured_gib']:9.3f} failed: {f['failed']}")
            continue
        smi = f["nvidia_smi_gib"]
        reserved = f["predicted_reserved_gib"] + CONTEXT_GIB
        against = f"{smi:7.2f} {f['reserved_error_pct']:+6.1f}%" if smi is not None else f"{'-':>7} {'-':>7}"
        print(
            f"{f['row']:66} {f['measured_gib']:9.3f} {f['predicted_gib']:9.3f} {f['error_pct']:+7.2f}% "
            f"{reserved:12.2f} {against}  {f['phase']}"
        )
    print()
    for s in slices(figures):
        print(
            f"{s['name']:8} {s['rows']:3} rows  median {s['median_abs_pct']:.2f} %  95th {s['p95_abs_pct']:.2f} %  "
            f"under by over 5 %: {100 * s['under_5_pct_share']:.0f} %"
        )
    for reason, count in skipped.items():
        print(f"left out {count:3}: {reason}")


if __name__ == "__main__":
    sys.exit(main())

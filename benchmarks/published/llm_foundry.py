"""Rows of llm-foundry's MPT training benchmarks (scripts/train/benchmarking), as requests.

What no column says is that source's scripts (submit_benchmarks.py, sweep.sh): the models of scripts/train/yamls,
Triton's FlashAttention (the first version), LayerNorm in low precision, FSDP that keeps fp32 shards and computes in
bf16, an optimizer that updates tensor by tensor, gradients clipped, torch 1.13 and 2.0, whose checkpointing of either
kind computes all of a layer again (the early stop came with 2.1). Nodes of 8 with 1600 Gbit/s (A100), 3200 (H100).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from published.gpus import devices_of, key_of
from published.records import Record
from trainwright.anatomy import Anatomy, anatomy, read_config
from trainwright.estimate.request import Request
from trainwright.hardware.inventory import Device

SOURCE = "github.com/mosaicml/llm-foundry"
MODELS = {
    "MPT-125m": (768, 12, 12),
    "MPT-350m": (1024, 16, 24),
    "MPT-760m": (1536, 12, 24),
    "MPT-1b": (2048, 16, 24),
    "MPT-3b": (2560, 20, 32),
    "MPT-7b": (4096, 32, 32),
    "MPT-13b": (5120, 40, 40),
    "MPT-30b": (7168, 56, 48),
    "MPT-70b": (8192, 64, 80),
}
"""Hidden size, heads, layers."""
VOCABULARY = 50_368


def why_not(record: Record) -> str | None:
    """Return why a row has no time, by its configuration alone."""
    if record["model"] not in MODELS:
        return f"llm-foundry: no dimensions for {record['model']}"
    if "fp8" in record["precision"]:
        return "llm-foundry: fp8 arithmetic (Transformer Engine), which no request has"
    if "act_cpu_offload=True" in record["notes"]:
        return "llm-foundry: activations in host memory"
    if key_of(record["gpu"]) is None:
        return f"GPU not in the catalogue: {record['gpu']}"
    return None


def case_of(record: Record) -> tuple[Anatomy, Request, tuple[Device, ...], float]:
    """Return the model, the step, its devices, and the seconds that a step took."""
    hidden, heads, layers = MODELS[record["model"]]
    config: dict[str, Any] = {
        "model_type": "mpt",
        "d_model": hidden,
        "n_heads": heads,
        "n_layers": layers,
        "vocab_size": VOCABULARY,
    }
    ranks, micro_batch = int(float(record["world_size"])), int(float(record["micro_batch"]))
    steps = int(float(record["grad_accum"]))
    request = Request(
        config=config,
        precision="bf16",
        weights="fp32",
        optimizer="adamw_loop",
        attention="efficient",
        fused_kernels=["norm"],
        micro_batch_size=micro_batch,
        sequence_length=int(float(record["seq_len"])),
        batch="full",
        gradient_accumulation_steps=steps,
        gradient_checkpointing="reentrant" if record["grad_ckpt"] == "true" else "none",
        strategy="fsdp1",
        world_size=ranks,
        reshard_after_forward="grad_op" not in record["strategy"],
    )
    key = key_of(record["gpu"])
    assert key is not None
    tokens = micro_batch * steps * ranks * request.sequence_length
    model = anatomy(read_config(config))
    model = replace(model, family=replace(model.family, attention_is_eager=False))  # that of transformers is
    return model, request, devices_of(key, ranks), tokens / float(record["tokens_per_s"])

"""Rows of InternEvo's doc/en/train_performance.md: InternLM-7B on A100 with 4 x 100 Gbit/s a node, as requests.

What no column says is configs/7B_sft.py: bf16 weights, FlashAttention-2 with its rotary embedding and loss, apex's
RMSNorm, ZeRO-1 whose optimizer states are spread over `zero1` ranks (-1: all).
"""

from __future__ import annotations

from typing import Any

from published.gpus import devices_of, key_of
from published.records import Record
from trainwright.anatomy import Anatomy, anatomy, read_config
from trainwright.estimate.request import Request
from trainwright.hardware.inventory import Device

SOURCE = "github.com/InternLM/InternEvo"
INTERNLM_7B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 103_168,
    "max_position_embeddings": 2048,
}
NETWORK_GB_S = 4 * 100 / 8
"""Of a node."""


def why_not(record: Record) -> str | None:
    """Return why a row has no time, by its configuration alone."""
    if "tp1" not in record["strategy"].split():
        return "InternEvo: tensor parallelism, which no request has"
    if record["model"] != "InternLM-7B":
        return f"no config at hand for {record['model']}"
    if key_of(record["gpu"]) is None:
        return f"GPU not in the catalogue: {record['gpu']}"
    return None


def case_of(record: Record) -> tuple[Anatomy, Request, tuple[Device, ...], float]:
    """Return the model, the step, its devices, and the seconds that a step took."""
    key = key_of(record["gpu"])
    assert key is not None
    ranks, micro_batch = int(float(record["world_size"])), int(float(record["micro_batch"]))
    request = Request(
        config=INTERNLM_7B,
        precision="bf16",
        weights="bf16",
        autocast=False,
        recipe="transformers",
        fused_kernels=["norm", "rotary", "loss"],
        attention="flash_attention_2",
        micro_batch_size=micro_batch,
        sequence_length=int(float(record["seq_len"])),
        batch="full",
        gradient_accumulation_steps=int(float(record["grad_accum"])),
        gradient_checkpointing="non_reentrant" if record["grad_ckpt"] == "true" else "none",
        strategy="zero1",
        world_size=ranks,
    )
    tokens = micro_batch * request.gradient_accumulation_steps * request.sequence_length
    return anatomy(read_config(INTERNLM_7B)), request, devices_of(key, ranks), tokens / float(record["tokens_per_s"])

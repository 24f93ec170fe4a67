"""Rows of torchtitan's docs/performance.md (2024-08, 3faaa1a): FSDP2 on 64 A100, as requests.

What no column says: fp32 shards computed in bf16, fused RMSNorm, scaled_dot_product_attention, fused AdamW.
"""

from __future__ import annotations

from published.gpus import devices_of, key_of
from published.models import config_of
from published.records import Record
from trainwright.anatomy import Anatomy, anatomy, read_config
from trainwright.estimate.request import Request
from trainwright.hardware.inventory import Device

SOURCE = "github.com/pytorch/torchtitan"


def why_not(record: Record) -> str | None:
    """Return why a row has no time, by its configuration alone."""
    if record["grad_ckpt"].startswith("selective"):
        return "torchtitan: selective activation checkpointing, which no request has"
    if config_of(record["model"]) is None:
        return f"no config at hand for {record['model']}"
    if key_of(record["gpu"]) is None:
        return f"GPU not in the catalogue: {record['gpu']}"
    return None


def case_of(record: Record) -> tuple[Anatomy, Request, tuple[Device, ...], float]:
    """Return the model, the step, its devices, and the seconds that a step took."""
    config, key = config_of(record["model"]), key_of(record["gpu"])
    assert config is not None and key is not None
    ranks, micro_batch = int(float(record["world_size"])), int(float(record["micro_batch"]))
    request = Request(
        config=config,
        precision="bf16",
        weights="fp32",
        fused_kernels=["norm"],
        micro_batch_size=micro_batch,
        sequence_length=int(float(record["seq_len"])),
        batch="full",
        gradient_accumulation_steps=int(float(record["grad_accum"])),
        gradient_checkpointing="non_reentrant" if record["grad_ckpt"] == "full" else "none",
        strategy="fsdp2",
        world_size=ranks,
    )
    tokens = micro_batch * request.gradient_accumulation_steps * request.sequence_length
    return anatomy(read_config(config)), request, devices_of(key, ranks), tokens / float(record["tokens_per_s"])

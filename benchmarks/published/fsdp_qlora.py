"""Rows of AnswerDotAI's fsdp_qlora (benchmarks_03_2024.md): seconds for 1024 samples, as requests.

What no column says is the default of train.py: LoRA of rank 64 on all linear layers, dropout 0.1, bf16, samples of the
stated length, no NVLink bridges, nothing accumulated.
"""

from __future__ import annotations

from typing import Any, Literal

from published.gpus import devices_of, key_of
from published.models import config_of
from published.records import Record, note, number
from trainwright.anatomy import Anatomy, anatomy, read_config
from trainwright.estimate.request import Method, Request
from trainwright.hardware.inventory import Device

SOURCE = "github.com/AnswerDotAI/fsdp_qlora"
SAMPLES = 1024
MODELS: dict[str, dict[str, Any]] = {
    "Yi 34B": {
        "model_type": "llama",
        "hidden_size": 7168,
        "intermediate_size": 20480,
        "num_hidden_layers": 60,
        "num_attention_heads": 56,
        "num_key_value_heads": 8,
        "vocab_size": 64_000,
        "max_position_embeddings": 4096,
    }
}


def seconds_of(record: Record) -> float | None:
    """Return the seconds of all samples."""
    found = note(record, "time_s")
    return None if found is None else number(found.split()[0])


def why_not(record: Record) -> str | None:
    """Return why a row has no time, by its configuration alone."""
    if "offload" in record["notes"]:
        return "fsdp_qlora: FSDP with weights in host memory, which no request has"
    if _config(record) is None:
        return f"no config at hand for {record['model']}"
    if key_of(record["gpu"]) is None:
        return f"GPU not in the catalogue: {record['gpu']}"
    return None


def case_of(record: Record) -> tuple[Anatomy, Request, tuple[Device, ...], float]:
    """Return the model, the step, its devices, and the seconds that a step took."""
    config, key, seconds = _config(record), key_of(record["gpu"]), seconds_of(record)
    assert config is not None and key is not None and seconds is not None
    ranks, micro_batch = int(float(record["world_size"])), int(float(record["micro_batch"]))
    kind: Literal["lora", "qlora"] = "qlora" if record["method"] == "qlora" else "lora"
    request = Request(
        config=config,
        recipe="transformers",
        method=Method(type=kind, r=64, alpha=16.0, dropout=0.1, adapter_dtype="base"),
        precision="bf16",
        weights="bf16",
        autocast=False,
        micro_batch_size=micro_batch,
        sequence_length=int(float(record["seq_len"])),
        batch="full",
        gradient_checkpointing="reentrant",
        strategy="ddp" if "no_shard" in record["strategy"] else "fsdp1",
        world_size=ranks,
    )
    return anatomy(read_config(config)), request, devices_of(key, ranks), seconds / (SAMPLES / (micro_batch * ranks))


def _config(record: Record) -> dict[str, Any] | None:
    return MODELS.get(record["model"]) or config_of(record["model"])

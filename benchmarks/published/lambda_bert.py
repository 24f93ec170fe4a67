"""Rows of Lambda's deep learning benchmark: NVIDIA's BERT on SQuAD (run_squad.py) with apex, as requests.

What no column says is that source's scripts: NGC containers (TF32 on), peer access switched off (`NCCL_P2P_DISABLE=1`
in scripts/benchmark_pytorch.sh), attention written out, GELU and LayerNorm fused, no checkpointing; apex's FusedAdam
with fp16, BertAdam with fp32 (`update_of`). run_squad.py divides `max_steps` batches by the time, also when the
epochs end before (`for epoch in range(num_train_epochs)`, then `training_sequences_per_second`): the sequences that
were really trained are counted here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from published.gpus import devices_of, key_of
from published.records import Record, note
from trainwright.anatomy import Anatomy, anatomy, read_config
from trainwright.anatomy.parts import ModuleWeight, Segment
from trainwright.estimate.request import Request
from trainwright.estimate.time.update import Update
from trainwright.hardware.inventory import Device

SOURCE = "github.com/lambdal/deeplearning-benchmark"
BASE = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
}
LARGE = BASE | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
GPUS = {
    "A100_PCIe": "a100-40gb-pcie",
    "A100_SXM4": "a100-40gb",
    "A100_p4": "a100-40gb",
    "RTX 3080": "rtx-3080-10gb",
    "V100_16GB": "v100-16gb",
}
"""Names without a size, by the year of the rows; `p4` is AWS's p4d.24xlarge, LambdaCloud's V100 are SXM2."""
SQUAD_SEQUENCES = 88_641
"""Features of SQuAD 1.1 with 384 tokens and a stride of 128, uncased."""
EPOCHS = 2
MAX_STEPS: dict[str, tuple[int, int, int, int]] = {
    "A4000": (100, 200, 2500, 5000),
    "A4500": (200, 400, 2500, 5000),
    "A5500": (1000, 1000, 1000, 1000),
    "A5000": (1000, 1000, 1000, 1000),
    "3090": (1000, 1000, 1000, 1000),
}
"""`max_steps` of base in fp32 and fp16, then of large, where a run can end before it (scripts/config_v0)."""


def why_not(record: Record) -> str | None:
    """Return why a row has no time, by its configuration alone."""
    if not record["model"].startswith(("bert-base", "bert-large")):
        return f"no config at hand for {record['model']}"
    if key_of(GPUS.get(record["gpu"], record["gpu"])) is None:
        return f"GPU not in the catalogue: {record['gpu']}"
    return None


def case_of(record: Record) -> tuple[Anatomy, Request, tuple[Device, ...], float]:
    """Return the model, the step, its devices, and the seconds that a step took."""
    large, half = "large" in record["model"], "fp16" in record["precision"]
    config = LARGE if large else BASE
    ranks, micro_batch = int(float(record["world_size"])), int(float(record["micro_batch"]))
    values: dict[str, Any] = {
        "precision": "fp16" if half else "fp32",
        "weights": "fp16" if half else "fp32",
        "autocast": False,
        "tf32": True,
        "optimizer": "adamw",
        "max_grad_norm": 1.0 if half else 0.0,
        "attention": "eager",
        "recipe": "transformers",
        "fused_kernels": ["norm", "loss"],
        "micro_batch_size": micro_batch,
        "sequence_length": int(float(record["seq_len"])),
        "batch": "full",
        "strategy": "single" if ranks == 1 else "ddp",
        "world_size": ranks,
    }
    request = Request(config=config, **values)
    key = key_of(GPUS.get(record["gpu"], record["gpu"]))
    assert key is not None
    sequences = float(record["tokens_per_s"]) / request.sequence_length * _really_trained(record, large, half)
    seconds = micro_batch * ranks / sequences
    return _question_answering(config), request, devices_of(key, ranks, node=max(ranks, 8)), seconds


def update_of(record: Record) -> Update:
    """Return what the optimizer does.

    FusedAdam has its seven passes. BertAdam (optimization.py) has twelve kernels a tensor: mul_, add_, mul_, addcmul_,
    sqrt, +, /, decay *, +=, rate *, -, add_ (29 passes). Before them it clips each tensor by its own norm, which in the
    first container (results without `_v1` in their name: torch 1.4 to 1.7) is seven kernels that end in a comparison
    on the host (one pass), and in the second (22.09: torch 1.13) eight without (three passes). `zero_grad` writes
    zeros, to which the next backward pass adds (four passes; of fp16 gradients in half the bytes).
    """
    if "fp16" in record["precision"]:
        return Update(7 + 4 / 2)
    if "_v1" in _system_of(record):
        return Update(29 + 3 + 4, kernels=12 + 8 + 1)
    return Update(29 + 1 + 4, kernels=12 + 7 + 1, waits=True)


def _system_of(record: Record) -> str:
    found = re.match(r"results/(?:\d+x)?([^/]+)/", note(record, "dir") or "")
    return found.group(1) if found else ""


def _really_trained(record: Record, large: bool, half: bool) -> float:
    """Return the share of `max_steps` that the epochs of a run hold."""
    system = _system_of(record)
    if system not in MAX_STEPS:
        return 1.0
    most = MAX_STEPS[system][2 * large + half]
    per_epoch = -(-SQUAD_SEQUENCES // int(float(record["micro_batch"]) * float(record["world_size"])))
    return min(1.0, EPOCHS * per_epoch / most)


def _question_answering(config: dict[str, Any]) -> Anatomy:
    """BERT with two logits for each token instead of the vocabulary."""
    whole = anatomy(read_config(config))

    def body(segment: Segment) -> Segment:
        kept = tuple(
            o for o in segment.operations if segment.is_layer or not isinstance(o, ModuleWeight) or not _is_head(o)
        )
        return segment if len(kept) == len(segment.operations) else replace(segment, operations=kept)

    segments = tuple(s for s in map(body, whole.segments) if s.operations)
    return replace(whole, segments=segments)


def _is_head(weight: ModuleWeight) -> bool:
    return weight.part == "head" or "predictions" in weight.name or weight.writes == ("logits",)

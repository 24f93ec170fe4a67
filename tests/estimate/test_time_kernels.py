"""What the time counts by formula, kernels and the bytes that they move, against what a traced step really runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from tracing import ENVIRONMENT, GPT2, HERE, LLAMA, T5

from trainwright.anatomy import anatomy, read_config
from trainwright.estimate.request import Request
from trainwright.estimate.time import compute
from trainwright.estimate.time.rates import speed_of
from trainwright.hardware import catalog

DEEP: dict[str, Any] = LLAMA | {"num_hidden_layers": 8}
QWEN = DEEP | {"model_type": "qwen2"}
GEMMA = DEEP | {"model_type": "gemma3_text", "head_dim": 64, "sliding_window": 64}
NEOX = {"model_type": "gpt_neox", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8,
        "num_attention_heads": 4, "vocab_size": 4096}  # fmt: skip
LORA = {"method": {"type": "lora", "r": 8}}
QLORA = {"method": {"type": "qlora", "r": 8}}
CHECKPOINTED = {"gradient_checkpointing": "non_reentrant"}
SEQ2SEQ = {"auto_class": "AutoModelForSeq2SeqLM", "target_length": 512}

# How far the kernels of a pass, and the bytes that those between the products move, may be off. GPT-2's norms are one
# operator on the way back, and two kernels on CUDA.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float, float]] = {
    "full": (DEEP, {}, 0.05, 0.08),
    "full, checkpointed": (DEEP, CHECKPOINTED, 0.05, 0.08),
    "full, biases": (QWEN, {}, 0.05, 0.08),
    "lora": (DEEP, LORA, 0.05, 0.05),
    "lora, checkpointed": (DEEP, LORA | CHECKPOINTED, 0.05, 0.05),
    "qlora": (DEEP, QLORA, 0.05, 0.05),
    "lora, masks of windows": (GEMMA, LORA, 0.06, 0.12),
    "padded": (DEEP, {"batch": "padded"}, 0.06, 0.12),
    "gpt-neox": (NEOX, {}, 0.05, 0.12),
    "gpt-2": (GPT2 | {"n_layer": 8, "n_positions": 512}, {}, 0.20, 0.05),
    "t5": (T5 | {"num_layers": 8, "num_decoder_layers": 8}, SEQ2SEQ, 0.05, 0.10),
}
SHAPE: dict[str, Any] = {"micro_batch_size": 4, "sequence_length": 512, "batch": "full", "compute_capability": [9, 0]}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[int, int]]]:
    path = tmp_path_factory.mktemp("launched") / "requests.json"
    path.write_text(json.dumps([{"config": config, **SHAPE, **more} for config, more, *_ in CASES.values()]))
    command = [sys.executable, str(HERE / "launched_kernels.py"), str(path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_formula_counts_the_kernels_and_bytes_of_a_traced_step(
    launched: dict[str, dict[str, tuple[int, int]]], case: str
) -> None:
    """Packed weights apart, which are unpacked by kernels of their own that no trace runs."""
    config, more, kernels_within, bytes_within = CASES[case]
    request, speed = Request.parse({"config": config, **SHAPE, **more}), speed_of(catalog.catalog().gpus["h100"])
    model = anatomy(read_config(config))
    found, faster = (
        compute.micro_batch(model, request, replace(speed, bandwidth=speed.bandwidth * factor)) for factor in (1, 2)
    )
    unpacked = sum(7 * compute.NF4_KERNELS for _ in model.layers) if request.method.type == "qlora" else 0
    for phase, names in {"forward": ["forward"], "backward": ["recompute", "backward"]}.items():
        kernels = sum(getattr(found, name).kernels for name in names) - unpacked
        halved_s = sum(getattr(found, name).memory_s - getattr(faster, name).memory_s for name in names)
        moved = 2 * halved_s * speed.bandwidth.usual
        real_kernels, real_bytes = launched[case][phase]
        print(case, phase, kernels / real_kernels, moved / real_bytes)
        assert kernels == pytest.approx(real_kernels, rel=kernels_within)
        assert moved == pytest.approx(real_bytes, rel=bytes_within)

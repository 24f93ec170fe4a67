"""The traced step against the same step on real CPU tensors, for 20 models and layouts.

    python benchmarks/trace_steps.py [--json]

Both sides pass through the same tracker, so this checks what fake tensors and their answers change; kernels of CUDA
take other temporaries, which no CPU can show. Exits with 1 if a peak is off by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT_PCT = 1.0

_SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}
_HEADS_OF_64 = _SMALL | {"head_dim": 64}
_GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 512, "n_head": 8, "n_positions": 512, "vocab_size": 8192}
_T5 = {
    "model_type": "t5",
    "d_model": 512,
    "d_ff": 1024,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 8,
    "d_kv": 64,
    "vocab_size": 8192,
    "decoder_start_token_id": 0,
}
_BERT = _SMALL | {"model_type": "bert"}
_VIT = {
    "model_type": "vit",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "image_size": 112,
}
_WHISPER = {
    "model_type": "whisper",
    "d_model": 384,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "max_source_positions": 300,
    "vocab_size": 8192,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
}
_TRAINER = {"recipe": "transformers", "weights": "bf16", "autocast": False}
_CHECKPOINTED = {"gradient_checkpointing": "non_reentrant"}
_SEQ2SEQ = {"auto_class": "AutoModelForSeq2SeqLM", "target_length": 96}
_LORA = {"method": {"type": "lora", "r": 16}}


def _decoder(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_SMALL, **more}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama full": (_decoder("llama"), {}),
    "llama full, checkpointed, 3 micro-batches": (
        _decoder("llama"),
        {**_CHECKPOINTED, "gradient_accumulation_steps": 3},
    ),
    "llama lora, dropout": (_decoder("llama"), {"method": {"type": "lora", "r": 16, "dropout": 0.1}}),
    "llama lora, reentrant, Trainer": (
        _decoder("llama"),
        {**_LORA, **_TRAINER, "gradient_checkpointing": "reentrant", "optimizer": "adamw_foreach"},
    ),
    "llama packed": (_decoder("llama"), {"batch": "packed"}),
    "llama eager": (_decoder("llama"), {"attention": "eager"}),
    "qwen2 fp32": (_decoder("qwen2"), {"precision": "fp32", "batch": "full"}),
    "qwen3 lora, checkpointed": ({"model_type": "qwen3", **_HEADS_OF_64}, {**_LORA, **_CHECKPOINTED}),
    "mistral, no clipping": (_decoder("mistral"), {"max_grad_norm": 0.0, "batch": "full"}),
    "gemma3, Trainer, checkpointed": ({"model_type": "gemma3_text", **_HEADS_OF_64}, {**_TRAINER, **_CHECKPOINTED}),
    "phi3, Trainer, one tensor at a time": (
        _decoder("phi3", pad_token_id=0),
        {**_TRAINER, "optimizer": "adamw_loop"},
    ),
    "gpt-neox": (_decoder("gpt_neox"), {}),
    "gpt2, Trainer with autocast": (_GPT2, {"recipe": "transformers", "weights": "fp32"}),
    "gpt2 lora": (_GPT2, {"method": {"type": "lora", "r": 8, "targets": ["c_attn"]}, "batch": "full"}),
    "t5 full": (_T5, _SEQ2SEQ),
    "t5 adafactor, checkpointed": (_T5, {**_SEQ2SEQ, **_CHECKPOINTED, "optimizer": "adafactor"}),
    "bert masked": (_BERT, {**_TRAINER, "auto_class": "AutoModelForMaskedLM"}),
    "bert classifier, fp32": (
        _BERT,
        {"recipe": "transformers", "precision": "fp32", "auto_class": "AutoModelForSequenceClassification"},
    ),
    "vit": (_VIT, {"recipe": "transformers", "precision": "fp32", "auto_class": "AutoModelForImageClassification"}),
    "whisper": (
        _WHISPER,
        {
            "recipe": "transformers",
            "precision": "fp32",
            "auto_class": "AutoModelForSpeechSeq2Seq",
            "target_length": 64,
        },
    ),
}


def main() -> int:
    """Print both peaks of every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    shape = {"micro_batch_size": 4, "sequence_length": 256, "device": "cpu"}
    requests = [{"config": config, **shape, **options} for config, options in CASES.values()]
    traced = answers_of(["-m", "trainwright.estimate.trace.answer"], requests)
    real = answers_of([str(ROOT / "tests/estimate/real_steps.py")], requests)
    rows = []
    for name, answer, measured in zip(CASES, traced, real, strict=True):
        peak = max(phase["requested_bytes"] for phase in answer["phases"])
        expected = max(measured.values())
        rows.append(
            {"case": name, "real_bytes": expected, "traced_bytes": peak, "error_pct": 100 * (peak / expected - 1)}
        )
    if as_json:
        json.dump(rows, sys.stdout)
        print()
    else:
        print(f"{'case':44} {'real MiB':>10} {'traced MiB':>10} {'error':>9}")
        for row in rows:
            real_mib, traced_mib = row["real_bytes"] / 2**20, row["traced_bytes"] / 2**20
            print(f"{row['case']:44} {real_mib:10.3f} {traced_mib:10.3f} {row['error_pct']:+8.4f}%")
    return int(any(abs(row["error_pct"]) > LIMIT_PCT for row in rows))


def answers_of(script: list[str], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a script, or a module behind `-m`, answers to requests in a file."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(requests, file)
        file.flush()
        command = [sys.executable, *script, file.name]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())

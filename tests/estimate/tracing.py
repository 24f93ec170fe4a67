"""Requests for small models, and the processes that trace them or really run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gloo import run_group

HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 256, "n_head": 4, "n_positions": 256, "vocab_size": 4096}
T5 = {
    "model_type": "t5",
    "d_model": 256,
    "d_ff": 512,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "d_kv": 64,
    "vocab_size": 4096,
    "decoder_start_token_id": 0,
}
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 4096,
}


def request(config: dict[str, Any] = LLAMA, **values: Any) -> dict[str, Any]:
    """Return a request for a small model, with what a test changes."""
    return {"config": config, "micro_batch_size": 2, "sequence_length": 128, **values}


def trace(requests: Any, folder: Path, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command on requests."""
    path = folder / "requests.json"
    path.write_text(json.dumps(requests))
    command = [sys.executable, "-m", "trainwright.estimate.trace.answer", str(path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


def really_run(requests: Sequence[dict[str, Any]], folder: Path, *, ranks: int = 1) -> list[dict[str, int]]:
    """Run requests on real tensors, in one process or in a gloo group; return the peaks of rank 0."""
    path = folder / f"real_{ranks}.json"
    path.write_text(json.dumps(requests))
    command = [sys.executable, str(HERE / "real_steps.py"), str(path)]
    if ranks == 1:
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        first: list[dict[str, int]] = json.loads(done.stdout)
        return first
    found: list[dict[str, int]] = json.loads(run_group(command, folder, ranks)[0])
    return found


def phases(answer: dict[str, Any]) -> dict[str, int]:
    """Return the peak of each phase of a traced request, as `really_run` does."""
    found = {f"{phase['phase']} {phase['step']}": phase["requested_bytes"] for phase in answer["phases"]}
    return {"static": answer["static_bytes"], **found}

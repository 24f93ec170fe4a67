"""Loads one model from files of two dtypes as the workers do, bf16 under adapters; prints private bytes as JSON.

`python loading_models.py CONFIG FOLDER`; each file is loaded by a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainwright.job.schema import Job
from trainwright.train.models import build_model

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def private_bytes() -> int:
    """Return what this process alone holds."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))


def load(folder: str) -> int:
    """Return the private bytes that the loaded model adds."""
    job = Job.model_validate(
        {"name": "x", "task": "causal-lm", "model": {"name": folder}, "method": {"type": "lora", "r": 8}}
    )
    # A first small matrix product and peft's import are no part of the model.
    import peft  # noqa: F401

    torch.ones(64, 64) @ torch.ones(64, 64)
    before = private_bytes()
    model = build_model(job, auto_class="AutoModelForCausalLM", tokenizer=None, precision="bf16", on_meta=False)
    assert model is not None
    return private_bytes() - before


def main(config: str, folder: Path) -> None:
    """Write both files, load each, and print."""
    settings = json.loads(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    found = {}
    for name, dtype in DTYPES.items():
        model.to(dtype).save_pretrained(folder / name)
        done = subprocess.run(
            [sys.executable, __file__, str(folder / name)], capture_output=True, text=True, check=True
        )
        found[name] = int(done.stdout.splitlines()[-1])
    print(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(load(sys.argv[1]))
    else:
        main(sys.argv[1], Path(sys.argv[2]))

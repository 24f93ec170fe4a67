"""One rank that computes the gradient of one global batch: `python union_gradients.py STORE FOLDER STRATEGY WEIGHTS`.

Through the step loop's own pass, with parts of the given sizes; rank 0 leaves what it got in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from trainwright.job.batch_schedule import Batch, Position
from trainwright.job.schema import Job
from trainwright.train.balance import Balance
from trainwright.train.cutting.split import Split
from trainwright.train.data.tokenizer import train_tokenizer
from trainwright.train.feeding import Feed
from trainwright.train.loop import StepLoop
from trainwright.train.ranks import Ranks
from trainwright.train.step_timer import Sections
from trainwright.train.strategies.fsdp2 import FullySharded
from trainwright.train.strategies.replicated import Replicated
from trainwright.train.tasks.causal_lm import CausalLM

SAMPLES, AT_ONCE, VOCABULARY = 8, 2, 300
CPU = torch.device("cpu")


class Drawn:
    """Samples of different lengths, from a seed."""

    def __init__(self) -> None:
        draw = np.random.default_rng(1)
        self._tokens = [draw.integers(3, VOCABULARY, draw.integers(8, 40)) for _ in range(SAMPLES)]
        self.lengths = np.array([len(tokens) for tokens in self._tokens])
        self.targets = self.lengths - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def gradients(strategy_name: str, weights: list[int], rank: int) -> dict[str, torch.Tensor]:
    """Return the whole gradient of every parameter."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, **sizes))
    model.train()
    job = Job.model_validate({"name": "a", "model": {"name": "b"}, "data": {"path": "c"}})
    ranks = Ranks(rank, len(weights), CPU)
    sharded = strategy_name == "fsdp2"
    strategy: Any = (
        FullySharded(model, job.train, device=CPU, precision="fp32")
        if sharded
        else Replicated(model, job.train, device=CPU, name=strategy_name, fp16=False)
    )
    task = CausalLM(job, train_tokenizer(["a text of few words"], 300, ends_with_eos=False))
    data: Any = Drawn()
    rest: dict[str, Any] = dict.fromkeys(StepLoop.__dataclass_fields__)
    loop = StepLoop(
        **rest
        | {
            "job": job,
            "assignment": SimpleNamespace(rank=rank, precision="fp32"),
            "ranks": ranks,
            "task": task,
            "strategy": strategy,
            "train_data": data,
            "sections": Sections(CPU),
            "balance": Balance(Split(tuple(weights), (AT_ONCE,) * len(weights)), ranks, None, settled=True),
        }
    )
    batch = Batch(0, 0, SAMPLES, Position(), Position(1, 0, SAMPLES, SAMPLES))
    loop._forward_backward(batch, np.arange(SAMPLES), int(data.targets.sum()), Feed(data, task, CPU))
    return {
        name: (parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad).clone()
        for name, parameter in strategy.module.named_parameters()
    }


if __name__ == "__main__":
    store, folder, asked = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for name, strategy_name, weights in json.loads(asked):
        found = gradients(strategy_name, weights, rank)
        if rank == 0:
            save_file(found, Path(folder) / f"{name}.safetensors")
    dist.destroy_process_group()

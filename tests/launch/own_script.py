"""A script of a user's own, as accelerate's documentation writes them: it trains a tiny llama and says what it found.

With ACCELERATE_TORCH_DEVICE=cpu the CPU stands in for GPUs, and gloo for NCCL: accelerate shards on accelerators only.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

if os.environ.get("ACCELERATE_TORCH_DEVICE") == "cpu":
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    import deepspeed

    # An extension that DeepSpeed would compile for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

accelerator = Accelerator(gradient_accumulation_steps=int(sys.argv[1]))
torch.manual_seed(3)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
whole = sum(parameter.numel() for parameter in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = DataLoader(torch.arange(64 * 8).reshape(64, 8) % 64, batch_size=4)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

losses = []
for batch in batches:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

held = [p.to_local() if hasattr(p, "to_local") else getattr(p, "ds_tensor", p) for p in model.parameters()]
plugin = accelerator.state.deepspeed_plugin
found = {
    "rank": accelerator.process_index,
    "processes": accelerator.num_processes,
    "type": accelerator.distributed_type.value,
    "mixed_precision": accelerator.mixed_precision,
    "losses": losses,
    "share_held": sum(tensor.numel() for tensor in held) / whole,
    "deepspeed": None if plugin is None else {"stage": model.zero_optimization_stage(), **model.config},
}
Path(sys.argv[2], f"rank_{accelerator.process_index}.json").write_text(json.dumps(found))
accelerator.end_training()
# DeepSpeed still refers to the process groups, so that gloo's threads outlive them. Before Python 3.14 one that asks
# for the interpreter while that shuts down aborts the process: https://github.com/pytorch/pytorch/pull/179291
sys.stdout.flush()
os._exit(0)

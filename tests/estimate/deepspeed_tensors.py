"""One of two ranks under DeepSpeed with offload on the CPU: prints what the engine holds after a step, as JSON.

`python deepspeed_tensors.py REQUESTS.json`, by `gloo.run_group`; one engine after the other, one for each request.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gloo import joined
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from trainwright.estimate.request import Request
from trainwright.job.schema import TrainSection
from trainwright.train.strategies.zero import Zero


def engine_config(request: Request) -> dict[str, Any]:
    """Return the DeepSpeed file of the request."""
    host = {"device": "cpu", "pin_memory": False}
    zero: dict[str, Any] = {"stage": int(request.strategy.removeprefix("zero")), "offload_optimizer": host}
    if request.offload == "optimizer+parameters":
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": request.micro_batch_size,
        "gradient_accumulation_steps": request.gradient_accumulation_steps,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": request.precision == "bf16"},
        "steps_per_print": 2**31,
    }


def bytes_of(tensors: Any) -> int:
    """Return the bytes of all tensors with content."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.numel() > 1)


def held(strategy: Zero, request: Request) -> dict[str, int]:
    """Return the bytes of the engine's host buffers by what they are for."""
    zero: Any = strategy._zero
    masters = strategy._flat_partitions()
    moments = [value for master in masters for value in zero.optimizer.state[master].values()]
    gradients = [master.grad for master in masters]
    if request.strategy != "zero3":
        return {
            "offloaded optimizer": bytes_of([*masters, *moments, *zero.param_buffer_of_bit16_for_cpu_offload_groups]),
            "offloaded gradients": bytes_of(
                [*gradients, zero.temp_grad_buffer_for_cpu_offload, *zero.accumulated_grads_in_cpu.values()]
            ),
        }
    found = {
        "offloaded optimizer": bytes_of([*masters, *moments]),
        "offloaded gradients": bytes_of([*gradients, zero.grad_partitions_flat_buffer]),
    }
    if request.offload == "optimizer+parameters":
        frozen = [p.ds_tensor for p in strategy.module.parameters() if not p.requires_grad]
        found["offloaded parameters"] = bytes_of([*zero.param_groups_fp16_flat_cpu_memory, *frozen])
    return found


def step(request: Request) -> dict[str, int]:
    """Train one optimizer step and return what is held then."""
    settings = dict(request.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if request.method.type == "lora":
        model = get_peft_model(model, LoraConfig(r=request.method.r, target_modules="all-linear"))
    strategy = Zero(model, TrainSection(), device=torch.device("cpu"), config=engine_config(request))
    tokens = torch.zeros(request.micro_batch_size, request.sequence_length, dtype=torch.int64)
    for index in range(request.gradient_accumulation_steps):
        with strategy.micro_step(last=index == request.gradient_accumulation_steps - 1):
            strategy.backward(strategy.forward(input_ids=tokens, labels=tokens).loss)
    strategy.step(1e-4, 1.0)
    return held(strategy, request)


def main(requests: list[Request]) -> None:
    """Print a list with the figures of each request."""
    torch.manual_seed(1)
    with joined():
        print(json.dumps([step(request) for request in requests]))


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    main([Request.parse(request) for request in asked])

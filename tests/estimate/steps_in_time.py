"""Models, devices and steps that the tests of the time share."""

from __future__ import annotations

from typing import Any

from trainwright.anatomy import Anatomy, anatomy, read_config
from trainwright.estimate.figures import StepTime
from trainwright.estimate.request import Method, Request
from trainwright.estimate.time import step_time
from trainwright.hardware.inventory import Device, parse_inventory

LLAMA_7B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
BERT_LARGE: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 30522,
}
SMALL: dict[str, Any] = LLAMA_7B | {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
LORA = Method(type="lora", r=16)
QLORA = Method(type="qlora", r=16)


def model(config: dict[str, Any]) -> Anatomy:
    return anatomy(read_config(config))


def devices(text: str) -> tuple[Device, ...]:
    return parse_inventory(text).usable


def step(gpus: str, config: dict[str, Any] = LLAMA_7B, **values: Any) -> StepTime:
    """The time of a step on these GPUs; one GPU alone, several with DDP, unless said otherwise."""
    found = devices(gpus)
    values = {"micro_batch_size": 4, "sequence_length": 2048, "precision": "bf16", "weights": "bf16"} | values
    values.setdefault("strategy", "single" if len(found) == 1 else "ddp")
    around = {name: values.pop(name) for name in ("network_gb_s", "peer_access", "update") if name in values}
    return step_time(model(config), Request(config=config, world_size=len(found), **values), found, **around)


def samples_a_second(gpus: str, config: dict[str, Any] = LLAMA_7B, **values: Any) -> float:
    """What the whole set of GPUs gets through."""
    made = values.get("micro_batch_size", 4) * values.get("gradient_accumulation_steps", 1) * len(devices(gpus))
    return float(made / step(gpus, config, **values).step_s)

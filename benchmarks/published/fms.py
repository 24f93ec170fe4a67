"""Rows of fms-acceleration (scripts/benchmarks at 876e2ed): HF Trainer on A100-80GB, as requests.

What no column says is that source's benchmark script: flash-attn, reentrant checkpointing, packed samples of one
length, LoRA dropout 0.1. Library versions are those of scripts/benchmarks/refs/requirements*.txt: torch 2.4.1, peft
0.13.2, accelerate 1.0.1, and transformers 4.48.1, for a100_80gb_liger.csv 4.45.2. The training program, fms-hf-tuning
2.5, gives tokenizers what they lack, and the model rows for it.

Where adapters are not sharded (`lora` of the fused kernels under FSDP1) the source's figure lacks them: they move to
the GPU between the stages whose deltas it sums (transformers/trainer_utils.py, `TrainerMemoryTracker`).
"""

from __future__ import annotations

from typing import Any

from published import models
from published.records import Record, note
from trainwright.estimate.allocator import SMALL_SEGMENT_BYTES
from trainwright.estimate.cuda_overhead import context_bytes
from trainwright.estimate.request import Request
from trainwright.hardware.catalog import GpuSpec

SOURCE = "github.com/foundation-model-stack/fms-acceleration"

GPTQ_GROUPS = {
    "Mistral-7B-v0.1-GPTQ": 128,
    "Mixtral-8x7B-Instruct-v0.1-GPTQ": -1,
    "Llama-2-70B-GPTQ": -1,
    "Meta-Llama-3-8B-GPTQ": 128,
}
"""Weights that share a scale, -1: a whole row; the main branch of each model of TheBloke and TechxGenus on the hub."""
PRECISIONS = ("bfloat16", "float16", "bfloat16+bf16_autocast", "float16+fp16_autocast")
LLAMA_VOCABULARY = 32000
ADDED_TOKENS = {LLAMA_VOCABULARY: 1, 128256: 2}
"""By the size of a vocabulary: padding for that of Llama 2 and Mistral, also an unknown token for that of Llama 3
(tuning/utils/tokenizer_data_utils.py, `set_special_tokens_dict` and `tokenizer_and_embedding_resize`)."""
REPEATED_HEADS = ("mistral", "mixtral")
"""Models whose flash attention repeated grouped heads before transformers 4.48 (models/*/modeling_*.py at 4.45.2)."""
PLUGINS = (
    "none",
    "foak-fast-kernels",
    "foak-fast-kernels-liger",
    "baseline-peft-bnb",
    "accelerated-peft-bnb",
    "accelerated-peft-bnb-foak",
    "accelerated-peft-bnb-foak-liger",
    "accelerated-peft-autogptq",
    "accelerated-peft-autogptq-foak",
    "accelerated-peft-autogptq-foak-liger",
)
"""Configurations of the plugins (`framework_config`) whose training step is known."""


def why_not(record: Record) -> str | None:
    """Return why a row cannot be traced, by its configuration alone."""
    if config_of(record["model"]) is None:
        return f"unknown model: {record['model']}"
    if "GPTQ" in record["model"] and record["model"].rpartition("/")[2] not in GPTQ_GROUPS:
        return f"unknown size of the groups that share a scale: {record['model']}"
    plugin = note(record, "framework_config") or "none"
    if plugin not in PLUGINS:
        return f"unknown configuration of plugins: {plugin}"
    if record["precision"] not in PRECISIONS:
        return f"unknown precision: `{record['precision']}`"
    if record["strategy"] not in ("single", "fsdp1_full_shard"):
        return f"unknown strategy: `{record['strategy']}`"
    if record["grad_ckpt"] not in ("true", "false"):
        return f"unknown grad_ckpt: `{record['grad_ckpt']}`"
    if record["method"] != "full" and not record["lora_targets"]:
        return "lora_targets is missing"
    if record["optimizer"].lower().partition(" ")[0] not in ("", "adamw", "adamw_torch"):
        return f"unknown optimizer: {record['optimizer']}"
    return None


def config_of(name: str) -> dict[str, Any] | None:
    """Return the config of a model by its name."""
    config, group_size = models.config_of(name), GPTQ_GROUPS.get(name.rpartition("/")[2])
    if config is None or group_size is None:
        return config
    return config | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": group_size}}


def transformers_of(record: Record) -> str:
    """Return the version of transformers that a row was measured with."""
    return "4.45.2" if "a100_80gb_liger" in (note(record, "file") or "") else "4.48.1"


def with_added_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the model that is trained; Llama's and its heirs' leave out the usual vocabulary."""
    usual = LLAMA_VOCABULARY if config["model_type"] in ("llama", *REPEATED_HEADS) else 0
    vocabulary = config.get("vocab_size", usual)
    added = ADDED_TOKENS.get(vocabulary, 0)
    return config | {"vocab_size": vocabulary + added} if added else config


def request_of(record: Record) -> dict[str, Any]:
    """Return the request that a row becomes."""
    framework = note(record, "framework_config") or ""
    method, strategy = record["method"], "fsdp1" if record["strategy"].startswith("fsdp1") else "single"
    world_size, micro_batch = int(float(record["world_size"])), int(float(record["micro_batch"]))
    dtype = "fp16" if record["precision"].startswith("float16") else "bf16"
    how: dict[str, Any] = {"type": method}
    if method != "full":
        how |= {"r": int(float(record["lora_rank"])), "alpha": 16.0, "dropout": 0.1}
        how |= {"targets": [name for name in record["lora_targets"].split() if name != "c_attn"]}
    config = config_of(record["model"])
    assert config is not None  # `why_not` asks first
    before_448 = transformers_of(record) == "4.45.2"
    if method == "qlora":
        how |= {"quant_storage": dtype if strategy == "fsdp1" else "uint8"}
        how |= {"upcast_frozen": "trl" if framework.startswith("baseline") and strategy == "single" else "none"}
    return {
        "config": with_added_tokens(config),
        "recipe": "transformers",
        "method": how,
        "precision": dtype,
        "weights": dtype,
        "autocast": "autocast" in record["precision"],
        "optimizer": "adamw_foreach",
        "micro_batch_size": micro_batch,
        "sequence_length": int(float(record["seq_len"])),
        "batch": "full",
        "gradient_accumulation_steps": int(float(record["grad_accum"])),
        "gradient_checkpointing": "reentrant" if record["grad_ckpt"] == "true" else "none",
        "attention": "flash_attention_2",
        "strategy": strategy,
        "world_size": world_size,
        "separate_experts": True,
        "fp32_logits": before_448,
        "repeated_heads": before_448 and config["model_type"] in REPEATED_HEADS,
        "shifted_logits_copied": True,
        "full_slices": True,
        "checkpoint_around_unit": True,
        "fused_kernels": fused_kernels(record),
    }


def contexts_of_others(request: Request, gpu: GpuSpec | None, framework: str | None) -> dict[str, int]:
    """Return what the other ranks take of a GPU, in bytes, where the plugin for GPTQ models loads them.

    It asks for no map of devices and so gets `auto` (gptqmodel/models/base.py), for which accelerate puts a number on
    every GPU to ask for its memory (accelerate/utils/modeling.py, `get_max_memory`); what it answers is thrown away.
    """
    others = request.world_size - 1
    if not others or "autogptq" not in (framework or ""):
        return {}
    return {"contexts of other ranks": others * (context_bytes(gpu) + SMALL_SEGMENT_BYTES)}


def fused_kernels(record: Record) -> list[str]:
    """Return the parts that the plugin for fused operations and kernels (foak) replaces.

    The norms too, though the sample configurations at first misspell their key (`fast_rsm_layernorm`): until 0.4 the
    plugin took true where nothing is said. `fused_lora` is for packed base models only.
    """
    framework = note(record, "framework_config") or ""
    if "foak" not in framework:
        return []
    liger = "liger" in framework
    parts = ["norm", "rotary", "output_loss" if liger else "loss"]
    if record["method"] == "qlora":
        parts.append("lora")
    return parts

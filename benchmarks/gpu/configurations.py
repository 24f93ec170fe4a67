"""What is predicted and measured: training steps as a user would ask for them, each as a Request and as a Job."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainwright.anatomy import catalog, read_config
from trainwright.job.padding import needs_padding_mask

TOKEN_IDS = {"pad_token_id": 0, "eos_token_id": 1}
"""Those of the stand-in for a tokenizer in steps.py; the workers write them into the config of a model from scratch."""
SEQ2SEQ_TOKEN_IDS = TOKEN_IDS | {"decoder_start_token_id": 0}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One training step; lengths in tokens, batches in samples."""

    model: str
    config: dict[str, Any]
    micro_batch: int
    length: int
    method: Literal["full", "lora", "qlora"] = "full"
    r: int = 16
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"
    checkpointing: bool = False
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    batch: Literal["full", "padded", "packed"] = "full"
    accumulation: int = 1
    strategy: Literal["single", "ddp", "fsdp2"] = "single"
    ranks: int = 1
    """Several share the one GPU and exchange tensors over gloo."""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self._describe())

    def _describe(self) -> str:
        words = [self.model.split("/")[-1], self.method if self.method == "full" else f"{self.method} r{self.r}"]
        words += [] if self.targets == "all-linear" else ["+".join(self.targets)]
        words += [f"dropout {self.dropout}"] if self.dropout else []
        words += [f"b{self.micro_batch}", f"s{self.length}"]
        words += [f"x{self.accumulation}"] if self.accumulation > 1 else []
        words += ["ckpt"] if self.checkpointing else []
        words += [value for value in (self.precision, self.optimizer, self.batch) if value not in _USUAL]
        words += [f"{self.strategy} {self.ranks} ranks"] if self.ranks > 1 else []
        return " ".join(words)

    @property
    def task(self) -> str:
        """The workers' task."""
        return "seq2seq" if self.config["model_type"] == "t5" else "causal-lm"

    @property
    def needs(self) -> list[str]:
        """Libraries that must be there besides torch and transformers."""
        adapters = ["peft"] if self.method != "full" else []
        packed = self.method == "qlora" or self.optimizer == "adamw_8bit"
        return adapters + (["bitsandbytes"] if packed else [])

    @property
    def global_batch(self) -> int:
        """Samples in one optimizer step."""
        return self.micro_batch * self.accumulation * self.ranks

    @property
    def needs_mask(self) -> bool:
        """Whether the workers give an attention mask; those of 2026-11 always did, whose rows are in `results`."""
        return self.task == "seq2seq" or needs_padding_mask(self.config)

    def request(self, **more: Any) -> dict[str, Any]:
        """Return the Request as data, with `more` of its fields, such as those of the device."""
        seq2seq = self.task == "seq2seq"
        method = {"type": self.method, "r": self.r, "dropout": self.dropout, "targets": self.targets}
        return {
            "config": self.config | (SEQ2SEQ_TOKEN_IDS if seq2seq else TOKEN_IDS),
            "auto_class": "AutoModelForSeq2SeqLM" if seq2seq else "AutoModelForCausalLM",
            "method": method,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "micro_batch_size": self.micro_batch,
            "sequence_length": self.length,
            "batch": self.batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_checkpointing": "non_reentrant" if self.checkpointing else "none",
            "strategy": self.strategy,
            "world_size": self.ranks,
            **more,
        }

    def job(self, steps: int, model_folder: str | None) -> dict[str, Any]:
        """Return the Job as data: a model from scratch, or the one whose weights lie in a folder."""
        dimensions = {key: value for key, value in self.config.items() if key != "model_type"}
        scratch = {"architecture": self.config["model_type"], "dimensions": dimensions}
        method = {"type": self.method, "r": self.r, "dropout": self.dropout, "targets": self.targets}
        return {
            "name": "gpu-truth",
            "model": {"name": model_folder} if model_folder else {"from_scratch": scratch, "tokenizer": "none"},
            "task": self.task,
            "data": {"max_length": self.length, "packing": self.batch == "packed"},
            "method": method,
            "train": {
                "global_batch_size": self.global_batch,
                "max_steps": steps,
                "optim": self.optimizer,
                "learning_rate": 1e-6,
            },
            "tracking": [],
        }


_USUAL = ("bf16", "adamw", "full")


def _of(model: str, micro_batch: int, length: int, **more: Any) -> Configuration:
    entry = catalog.find(model)
    assert entry is not None, model
    # Said outright: the workers take that of the tokenizer where a model from scratch has none.
    config = entry.config | {"vocab_size": asdict(read_config(entry.config))["vocab_size"]}
    return Configuration(model=model, config=config, micro_batch=micro_batch, length=length, **more)


def _lora(model: str, micro_batch: int, length: int, **more: Any) -> Configuration:
    return _of(model, micro_batch, length, **{"method": "lora", **more})


_CK: dict[str, Any] = {"checkpointing": True}
_SMOL, _SMOL_360M = "HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-360M"
_QWEN, _QWEN_7B = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B"
_LLAMA_1B, _LLAMA_3B, _LLAMA_8B = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "meta-llama/Meta-Llama-3-8B"
_MISTRAL = "mistralai/Mistral-7B-v0.1"

# The budget may end before the list does: every slice has its most telling rows in the first half.
ON_GPU = [
    _of(_QWEN, 4, 2048),
    _of(_QWEN, 8, 2048, **_CK),
    _of(_LLAMA_1B, 4, 2048),
    _of(_LLAMA_1B, 4, 8192, **_CK),
    _of(_LLAMA_3B, 1, 2048),
    _lora(_QWEN_7B, 4, 2048, r=64, **_CK),
    _lora(_QWEN_7B, 2, 2048, r=64),
    _lora(_LLAMA_8B, 4, 4096, **_CK),
    _lora(_MISTRAL, 8, 2048, dropout=0.05, **_CK),
    _of(_QWEN, 4, 2048, batch="padded"),
    _of(_QWEN, 2, 4096, batch="packed"),
    _of(_QWEN, 4, 2048, accumulation=4),
    _of("openai-community/gpt2-medium", 16, 1024),
    _of("EleutherAI/pythia-410m", 8, 2048),
    _of("google-t5/t5-large", 8, 512),
    _lora("google/gemma-3-1b-pt", 4, 2048),
    _of(_QWEN, 2, 2048, strategy="fsdp2", ranks=2, **_CK),
    _lora(_LLAMA_1B, 2, 2048, strategy="fsdp2", ranks=2),
    _of(_SMOL_360M, 4, 1024, strategy="ddp", ranks=2),
    _lora(_QWEN, 4, 2048, strategy="ddp", ranks=2),
    _of(_QWEN, 1, 2048, strategy="fsdp2", ranks=4),
    _of(_SMOL_360M, 2, 1024, accumulation=2, strategy="fsdp2", ranks=4),
    _lora(_QWEN, 8, 1024, method="qlora"),
    _lora(_LLAMA_1B, 4, 2048, method="qlora", **_CK),
    _lora(_LLAMA_3B, 4, 2048, method="qlora", **_CK),
    _of(_QWEN, 4, 2048, optimizer="adamw_8bit"),
    _of(_QWEN, 4, 2048, optimizer="adafactor"),
    _of(_QWEN, 1, 512),
    _of(_QWEN, 4, 1024, precision="fp32"),
    _of(_QWEN, 4, 1024, precision="fp16"),
    _of(_SMOL, 8, 1024),
    _of(_SMOL, 32, 512),
    _of(_SMOL_360M, 8, 2048),
    _of(_SMOL_360M, 8, 2048, **_CK),
    _of("openai-community/gpt2-large", 8, 1024, **_CK),
    _of("EleutherAI/pythia-1.4b", 8, 2048, **_CK),
    _of(_LLAMA_1B, 1, 8192),
    _of("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 8, 2048, **_CK),
    _of("Qwen/Qwen2.5-1.5B", 2, 2048),
    _of("Qwen/Qwen3-1.7B", 4, 4096, **_CK),
    _of(_LLAMA_3B, 4, 4096, **_CK),
    _lora(_LLAMA_8B, 1, 2048),
    _lora(_LLAMA_8B, 16, 1024, **_CK),
    _lora(_QWEN_7B, 1, 8192, targets=["q_proj", "v_proj"], **_CK),
    _lora(_MISTRAL, 2, 4096, r=8),
    _lora("Qwen/Qwen3-4B", 4, 2048, r=32, **_CK),
    _lora("meta-llama/Llama-2-7b-hf", 8, 4096, **_CK),
    _lora("microsoft/Phi-3-mini-4k-instruct", 4, 2048, batch="packed", **_CK),
    _lora(_QWEN, 32, 512),
    # At the edge of an H200, where 16 bytes a parameter are 114 and 120 GiB, and beyond it.
    _of(_QWEN_7B, 1, 512, **_CK),
    _of(_LLAMA_8B, 1, 2048, **_CK),
    _of(_QWEN_7B, 8, 2048, **_CK),
    _lora(_LLAMA_8B, 8, 2048),
    _lora(_MISTRAL, 4, 2048, method="qlora", **_CK),
]

_TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
_TINY_T5 = {
    "model_type": "t5",
    "d_model": 128,
    "d_ff": 256,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "d_kv": 32,
    "vocab_size": 1000,
}


def _tiny(config: dict[str, Any] = _TINY_LLAMA, **more: Any) -> Configuration:
    return Configuration(model=f"tiny-{config['model_type']}", config=config, micro_batch=2, length=64, **more)


ON_CPU = [
    _tiny(**_CK),
    _tiny(method="lora", strategy="fsdp2", ranks=2),
    _tiny(strategy="ddp", ranks=2, accumulation=2, batch="packed"),
    _tiny(method="qlora", precision="fp32"),
    _tiny(_TINY_T5, batch="padded"),
]


def configurations(device: str, only: str = "") -> list[Configuration]:
    """Return the list for a kind of device, of which only those whose name has a match of `only`."""
    listed = ON_GPU if device == "cuda" else ON_CPU
    assert len({configuration.name for configuration in listed}) == len(listed)
    return [configuration for configuration in listed if re.search(only, configuration.name)]

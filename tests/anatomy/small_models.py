"""The same small model twice: as transformers builds it, and as our anatomy describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

from trainwright.anatomy import Anatomy, anatomy, read_config

AUTO_CLASSES = {"t5": "AutoModelForSeq2SeqLM", "bert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification"}

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
NEOX_LIKE = {key: value for key, value in LLAMA_LIKE.items() if key != "num_key_value_heads"}
GPT = {"vocab_size": 500, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
T5 = {
    "vocab_size": 500,
    "d_model": 64,
    "d_ff": 176,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "d_kv": 24,
}
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GRANITE_SCALES = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

SMALL: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA_LIKE},
    "llama tied, biased": {
        "model_type": "llama",
        **LLAMA_LIKE,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", **LLAMA_LIKE, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", **LLAMA_LIKE, "tie_word_embeddings": True},
    "qwen2 windowed": {"model_type": "qwen2", **LLAMA_LIKE, **WINDOWS},
    "qwen3": {"model_type": "qwen3", **LLAMA_LIKE, "head_dim": 24},
    "gemma": {"model_type": "gemma", **LLAMA_LIKE, "head_dim": 24},
    "gemma2": {"model_type": "gemma2", **LLAMA_LIKE, "head_dim": 24, "sliding_window": 8},
    "gemma3_text": {"model_type": "gemma3_text", **LLAMA_LIKE, "head_dim": 24, "sliding_window": 8},
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {**LLAMA_LIKE, "head_dim": 24, "sliding_window": 8},
        "vision_config": {**NEOX_LIKE, "image_size": 56, "patch_size": 14, "vision_use_head": False},
        "image_token_index": 7,
        "boi_token_index": 8,
        "eoi_token_index": 9,
    },
    "olmo2": {"model_type": "olmo2", **LLAMA_LIKE, "attention_bias": True},
    "olmo3": {"model_type": "olmo3", **LLAMA_LIKE, "num_hidden_layers": 4, "sliding_window": 8},
    "smollm3": {"model_type": "smollm3", **LLAMA_LIKE, "num_hidden_layers": 4, **SPECIAL_IDS},
    "granite": {"model_type": "granite", **LLAMA_LIKE, "tie_word_embeddings": True, **GRANITE_SCALES},
    "glm": {"model_type": "glm", **LLAMA_LIKE, "head_dim": 24, **SPECIAL_IDS},
    "glm4": {"model_type": "glm4", **LLAMA_LIKE, "head_dim": 24, "attention_bias": False, **SPECIAL_IDS},
    "ministral": {
        "model_type": "ministral",
        **LLAMA_LIKE,
        "head_dim": 24,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "ministral3": {"model_type": "ministral3", **LLAMA_LIKE, "head_dim": 24, **SPECIAL_IDS},
    "seed_oss": {"model_type": "seed_oss", **LLAMA_LIKE, "head_dim": 24},
    "seed_oss without dropout": {
        "model_type": "seed_oss",
        **LLAMA_LIKE,
        "residual_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_out_bias": True,
        "head_dim": 24,
    },
    "hunyuan": {"model_type": "hunyuan_v1_dense", **LLAMA_LIKE, "attention_bias": True, "head_dim": 24},
    "exaone4": {"model_type": "exaone4", **LLAMA_LIKE, "num_hidden_layers": 4, "sliding_window": 8},
    "exaone4 without a window": {
        "model_type": "exaone4",
        **LLAMA_LIKE,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
    },
    "ernie4_5": {"model_type": "ernie4_5", **LLAMA_LIKE, "head_dim": 24},
    "ernie4_5 biased": {"model_type": "ernie4_5", **LLAMA_LIKE, "head_dim": 24, "use_bias": True},
    "phi": {"model_type": "phi", **LLAMA_LIKE, "qk_layernorm": True},
    "phi3": {"model_type": "phi3", **LLAMA_LIKE, "pad_token_id": 0, "eos_token_id": 1},
    "phi3, a part turned": {"model_type": "phi3", **LLAMA_LIKE, "partial_rotary_factor": 0.75, **SPECIAL_IDS},
    "gpt2": {"model_type": "gpt2", **GPT},
    "gpt2 without dropout": {"model_type": "gpt2", **GPT, **NO_DROPOUT, "n_inner": 100},
    "gpt_neox": {"model_type": "gpt_neox", **NEOX_LIKE},
    "gpt_neox in sequence": {"model_type": "gpt_neox", **NEOX_LIKE, "use_parallel_residual": False},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **GPT, **NO_DROPOUT},
    "gpt_bigcode, all heads": {"model_type": "gpt_bigcode", **GPT, "multi_query": False},
    "starcoder2": {"model_type": "starcoder2", **LLAMA_LIKE},
    "mpt": {"model_type": "mpt", "vocab_size": 500, "d_model": 64, "n_layers": 3, "n_heads": 4},
    "opt": {"model_type": "opt", **NEOX_LIKE, "ffn_dim": 176},
    "opt projected": {
        "model_type": "opt",
        **NEOX_LIKE,
        "ffn_dim": 176,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
        "dropout": 0.0,
    },
    "opt without biases": {"model_type": "opt", **NEOX_LIKE, "ffn_dim": 176, "enable_bias": False, "dropout": 0.0},
    "bloom": {"model_type": "bloom", "vocab_size": 500, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "mixtral": {"model_type": "mixtral", **LLAMA_LIKE, "num_local_experts": 6},
    "qwen2_moe": {"model_type": "qwen2_moe", **LLAMA_LIKE, **MOE, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"model_type": "qwen3_moe", **LLAMA_LIKE, **MOE, "head_dim": 24},
    "t5": {"model_type": "t5", **T5},
    "t5 gated": {"model_type": "t5", **T5, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0},
    "bert": {"model_type": "bert", **NEOX_LIKE},
    "vit": {"model_type": "vit", **NEOX_LIKE, "image_size": 32, "patch_size": 8, "num_labels": 10},
}


def describe(raw: Mapping[str, Any]) -> Anatomy:
    """Our description of a fresh model."""
    return anatomy(read_config(raw, from_scratch=True))


def build(raw: Mapping[str, Any], *, device: str = "meta", **options: Any) -> nn.Module:
    """The model that transformers builds from the content of a config.json, without storage by default."""
    fields = {key: value for key, value in raw.items() if key != "model_type"}
    model_type = raw["model_type"]
    if model_type == "t5":
        fields["decoder_start_token_id"] = 0
    config = transformers.AutoConfig.for_model(model_type, **fields)
    auto_class = getattr(transformers, AUTO_CLASSES.get(model_type, "AutoModelForCausalLM"))
    with torch.device(device):
        model: nn.Module = auto_class.from_config(config, **options)
    model.config.use_cache = False
    return model


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by name, shared ones once."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

"""Whether a batch that is padded on the right needs an attention mask: not where attention looks back only.

A token that is learned stands before the padding of its row, and under causal attention it sees nothing behind itself:
losses and gradients are the same without a mask (`tests/anatomy/test_padding_masks.py` holds each family to 1e-6). With
one, scaled_dot_product_attention leaves its flash kernel, and every pair of tokens gets a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

WITHOUT_MASK: Final = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "llama",
        "mistral",
        "mixtral",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "starcoder2",
    }
)
"""Families whose forward pass in transformers 5.23 does without. OPT counts its positions from the mask, and those of
tokens before the padding are the same; routers of experts read it only for a loss that the workers do not ask for.
BLOOM and MPT are left out, as they make a mask of their own in any case; whatever is not listed keeps its mask."""


def needs_padding_mask(config: Mapping[str, Any]) -> bool:
    """Say whether a causal language model needs the mask of right padding; `config` is the content of config.json."""
    parts = [config, config["text_config"]] if isinstance(config.get("text_config"), Mapping) else [config]
    looks_ahead = any(part.get("use_bidirectional_attention") or part.get("is_causal") is False for part in parts)
    return looks_ahead or config.get("model_type") not in WITHOUT_MASK

"""Whether a batch that is padded on the right needs an attention mask: not where attention looks back only.

A token that is learned stands before the padding of its row, and under causal attention it sees nothing behind itself:
losses and gradients are the same without a mask (`tests/anatomy/test_padding_masks.py` holds each family to 1e-6). With
one, scaled_dot_product_attention leaves its flash kernel, and every pair of tokens gets a byte. Whatever has no record
keeps its mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.anatomy.families import FAMILIES, family


def needs_padding_mask(config: Mapping[str, Any]) -> bool:
    """Say whether a causal language model needs the mask of right padding; `config` is the content of config.json."""
    parts = [config, config["text_config"]] if isinstance(config.get("text_config"), Mapping) else [config]
    looks_ahead = any(part.get("use_bidirectional_attention") or part.get("is_causal") is False for part in parts)
    name = str(config.get("model_type"))
    return looks_ahead or name not in FAMILIES or not family(name).does_without_padding_mask

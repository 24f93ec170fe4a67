"""The flash-attn package in transformers, played by torch's kernel of the same code.

Before 4.48 every model had classes of its own for it, which repeat grouped heads or not; since then there is a table of
functions. Which masks are made follows from the name of the implementation (no mask at all, without padding).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

NAME = "flash_attention_2"


def implementation(attention: str) -> str | None:
    """Return what transformers is to build a model with; None: its own choice."""
    if attention == "auto":
        return None
    if attention == "eager":
        return "eager"
    return NAME if attention == NAME and _functions() is None else "sdpa"


def play(model: Any, repeated_heads: bool) -> None:
    """Let a model that was built for it compute its attention as flash-attn would.

    An earlier transformers repeats grouped heads by itself.
    """
    functions = _functions()
    if functions is None:
        vars(sys.modules[type(model).__module__])["_flash_attention_forward"] = _forward
    else:
        functions[NAME] = _with_repeated_heads if repeated_heads else _function
        model.config._attn_implementation = NAME


def _functions() -> Any:
    """Return the table of attention functions; without one, let models be built as if the package were there."""
    from transformers import modeling_utils

    functions = getattr(modeling_utils, "ALL_ATTENTION_FUNCTIONS", None)
    if functions is None:
        kind = modeling_utils.PreTrainedModel
        kind._check_and_enable_flash_attn_2 = classmethod(lambda cls, config, *args, **kwargs: config)
    return functions


def _function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers/integrations/flash_attention.py: (batch, length, heads, head size), grouped heads in the kernel."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if q.dtype == torch.float32:
        q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))
    return _forward(q, k, v, dropout=dropout, softmax_scale=scaling), None


def _with_repeated_heads(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """transformers 4.45, models/mistral/modeling_mistral.py (`repeat_kv`): copies where a key had been shared."""
    batch, heads, length, size = query.shape
    shared = (batch, key.shape[1], heads // key.shape[1], length, size)
    key, value = (t[:, :, None].expand(shared).reshape(query.shape) for t in (key, value))
    return _function(module, query, key, value, *args, **kwargs)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    dropout: float = 0.0,
    softmax_scale: float | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """transformers/modeling_flash_attention_utils.py, without padding."""
    output: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout, True, False, scale=softmax_scale
    )[0]
    return output

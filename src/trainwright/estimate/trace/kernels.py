"""Kernels that differ between CUDA and the meta device: dropout, attention, and operators whole on CUDA only."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from trainwright.estimate.capabilities import PREFERS_CUDNN
from trainwright.estimate.trace import engine

aten = torch.ops.aten

WHOLE_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")
"""Operators with a CUDA kernel that a build without CUDA breaks up into several, with temporaries of their own.

Found by listing the operators that have a CUDA and a CompositeImplicitAutograd kernel in the CUDA build of torch 2.13
(aten/src/ATen/native/native_functions.yaml).
"""

HALF = (torch.float16, torch.bfloat16)
_libraries: list[torch.library.Library] = []


@dataclass
class FakeDevice:
    """The GPU that is played: what its kernels can do, and which attention kernels were used."""

    compute_capability: tuple[int, int] = (8, 0)
    attention: str = "auto"
    """A kernel of scaled_dot_product_attention to insist on, or auto."""
    attention_used: Counter[str] = field(default_factory=Counter)


DEVICE = FakeDevice()


def register() -> None:
    """Register these kernels for fake CUDA tensors."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for name in WHOLE_ON_CUDA:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            # Never runs: fake tensors take the operator's meta kernel. That one exists keeps torch from decomposing.
            library.impl(name, _never_called, "CUDA")
    library.impl("dropout", _dropout, "AutogradCUDA")
    library.impl("one_hot", _one_hot, "AutogradCUDA")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCUDA")


def _never_called(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a fake tensor reached a CUDA kernel")


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """aten/src/ATen/native/Dropout.cpp: on CUDA one fused kernel that keeps a mask of bools."""
    if not train or p == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), device=tensor.device, dtype=tensor.dtype)
    dropped: torch.Tensor = aten.native_dropout(tensor, p, True)[0]
    return dropped


def _one_hot(tensor: torch.Tensor, num_classes: int) -> torch.Tensor:
    """aten/src/ATen/native/Onehot.cpp: fake tensors are compared with all classes there, real ones are scattered."""
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


def attention_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, grouped: bool
) -> str:
    """Return what `select_sdp_backend` takes on `DEVICE`: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.

    cuDNN comes first on Hopper and the Blackwell of data centres (`check_prefer_cudnn_attention`, with the cuDNN of
    CUDA 13 builds); elsewhere it is taken only if asked for. Heads up to 256 with torch 2.11.
    """
    capability = DEVICE.compute_capability
    first = capability[0] in PREFERS_CUDNN
    dense = q.dim() == 4 and all(t.stride(-1) == 1 for t in (q, k, v))
    half = q.dtype in HALF and (q.dtype == torch.float16 or capability >= (8, 0))
    head, same_head = q.shape[-1], q.shape[-1] == v.shape[-1]
    same_heads = q.shape[1] == k.shape[1]
    rows_dense = mask is None or mask.stride(-1) == 1
    aligned = head % (8 if q.dtype in HALF else 4) == 0 or capability < (8, 0)
    possible = {
        "flash": dense
        and half
        and capability >= (8, 0)
        and mask is None
        and same_head
        and head <= 256
        and (grouped or same_heads)
        and not (causal and q.shape[2] != k.shape[2]),
        "efficient": dense and rows_dense and aligned and (half or q.dtype == torch.float32) and same_heads,
        "cudnn": dense
        and rows_dense
        and half
        and capability >= (8, 0)
        and same_head
        and head % 8 == 0
        and head <= (256 if first else 128)
        and not (mask is not None and mask.requires_grad),
        "math": True,
    }
    order = ("cudnn", "flash", "efficient", "math") if first else ("flash", "efficient", "math")
    wanted = order if DEVICE.attention == "auto" else (DEVICE.attention, "math")
    return next(name for name in wanted if possible[name])


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """aten/src/ATen/native/transformers/attention.cpp: `scaled_dot_product_attention`, with what it does to masks."""
    kernel = attention_kernel(q, k, v, attn_mask, is_causal, enable_gqa)
    DEVICE.attention_used[kernel] += 1
    with_lse = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    output: torch.Tensor
    if kernel == "math":
        with engine.math_attention():
            return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
                q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
    if kernel == "flash":
        head = q.shape[-1]
        padding = -head % 8
        if padding:
            scale = scale if scale is not None else 1 / math.sqrt(head)
            q, k, v = (functional.pad(t, (0, padding)) for t in (q, k, v))
        output = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return output[..., :head] if padding else output
    bias = _as_bias(attn_mask, q)
    if kernel == "cudnn":
        output = aten._scaled_dot_product_cudnn_attention(
            q, k, v, bias, with_lse, dropout_p, is_causal, False, scale=scale
        )[0]
        return output
    if bias is not None:
        bias = _aligned(bias).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    output = aten._scaled_dot_product_efficient_attention(q, k, v, bias, with_lse, dropout_p, is_causal, scale=scale)[0]
    return output


def _as_bias(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """`convert_boolean_attn_mask`: true and false become 0 and -inf."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """`preprocess_mask`: rows begin at multiples of 16 elements, so a mask of another length is padded and sliced."""
    while bias.dim() < 4:
        bias = bias[None]
    length = bias.shape[-1]
    return functional.pad(bias, (0, -length % 16))[..., :length] if length % 16 else bias

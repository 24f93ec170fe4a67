"""Kernels that differ between CUDA and the meta device: dropout, attention, and operators whole on CUDA only."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from trainwright.estimate.capabilities import PREFERS_CUDNN
from trainwright.estimate.trace import engine, grouped_products

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
    grouped_products.register(library)


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
    asked = _AttentionCall(q, k, v, mask, causal, grouped, DEVICE.compute_capability)
    order = ("cudnn", "flash", "efficient", "math") if asked.prefers_cudnn else ("flash", "efficient", "math")
    wanted = order if DEVICE.attention == "auto" else (DEVICE.attention, "math")
    return next(name for name in wanted if asked.is_possible(name))


@dataclass(frozen=True)
class _AttentionCall:
    """The arguments of one attention on a GPU, and which kernels can compute it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    grouped: bool
    capability: tuple[int, int]

    @property
    def prefers_cudnn(self) -> bool:
        return self.capability[0] in PREFERS_CUDNN

    def is_possible(self, kernel: str) -> bool:
        if kernel == "math":
            return True
        is_dense = self.q.dim() == 4 and all(t.stride(-1) == 1 for t in (self.q, self.k, self.v))
        kernels = {"flash": self._suits_flash, "efficient": self._suits_efficient, "cudnn": self._suits_cudnn}
        return is_dense and kernels[kernel]()

    def _suits_flash(self) -> bool:
        return (
            self._in_half_since_ampere
            and self.mask is None
            and self._has_one_head_size
            and self._head <= 256
            and (self.grouped or self._has_as_many_heads)
            and not (self.causal and self.q.shape[2] != self.k.shape[2])
        )

    def _suits_efficient(self) -> bool:
        is_aligned = self._head % (8 if self.q.dtype in HALF else 4) == 0 or self.capability < (8, 0)
        in_a_dtype = self._in_half or self.q.dtype == torch.float32
        return self._has_dense_rows and is_aligned and in_a_dtype and self._has_as_many_heads

    def _suits_cudnn(self) -> bool:
        return (
            self._has_dense_rows
            and self._in_half_since_ampere
            and self._has_one_head_size
            and self._head % 8 == 0
            and self._head <= (256 if self.prefers_cudnn else 128)
            and not (self.mask is not None and self.mask.requires_grad)
        )

    @property
    def _in_half(self) -> bool:
        return self.q.dtype in HALF and (self.q.dtype == torch.float16 or self.capability >= (8, 0))

    @property
    def _in_half_since_ampere(self) -> bool:
        return self._in_half and self.capability >= (8, 0)

    @property
    def _head(self) -> int:
        size: int = self.q.shape[-1]
        return size

    @property
    def _has_one_head_size(self) -> bool:
        return bool(self._head == self.v.shape[-1])

    @property
    def _has_as_many_heads(self) -> bool:
        return bool(self.q.shape[1] == self.k.shape[1])

    @property
    def _has_dense_rows(self) -> bool:
        return self.mask is None or self.mask.stride(-1) == 1


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

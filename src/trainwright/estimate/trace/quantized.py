"""A stand-in for bitsandbytes' `Linear4bit` (nf4 with nested quantization): its memory, without its kernels.

bitsandbytes' own `Params4bit` is a tensor subclass, which cannot wrap a fake tensor. Sizes and temporaries are those
of bitsandbytes 0.45 to 0.49: functional.py `quantize_4bit`, `dequantize_4bit`; autograd/_functions.py `MatMul4Bit`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainwright.errors import ExitCode, UserError

BLOCK = 64
NESTED_BLOCK = 256
KEPT = ("lm_head",)
"""Modules that transformers leaves unpacked: the output embedding (quantizers/quantizers_utils.py)."""


class _Product(torch.autograd.Function):
    """The product with unpacked weights, which are unpacked once more for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, bias: torch.Tensor | None, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(inputs, unpack(layer), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient @ unpack(ctx.layer).to(gradient.dtype), None, None


def unpack(layer: Any) -> torch.Tensor:
    """Return the weights in the compute dtype; the scales become fp32 first."""
    scales = torch.empty(layer.absmax.shape, dtype=torch.float32, device=layer.weight.device)
    weight = torch.empty(layer.out_features, layer.in_features, dtype=layer.compute_dtype, device=layer.weight.device)
    del scales
    return weight


def pack(model: nn.Module, *, compute_dtype: torch.dtype, storage: torch.dtype) -> None:
    """Replace the linear layers of a model, but for the output embedding.

    Raises:
        UserError: bitsandbytes is missing; peft only adapts layers of its class.
    """
    kind = _layer_class()
    for name, module in list(model.named_modules()):
        owner, _, attribute = name.rpartition(".")
        if isinstance(module, nn.Linear) and attribute not in KEPT:
            setattr(model.get_submodule(owner), attribute, kind(module, compute_dtype, storage))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def _layer_class() -> Any:
    try:
        from bitsandbytes.nn import Linear4bit
    except ImportError as error:
        raise UserError(
            "method.type=qlora is traced with bitsandbytes",
            hints=["pip install 'trainwright[qlora]'"],
            exit_code=ExitCode.MISSING,
        ) from error

    class Packed(Linear4bit):
        def __init__(self, linear: nn.Linear, compute_dtype: torch.dtype, storage: torch.dtype) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.bias = linear.bias
            self.compute_dtype, self.compute_type_is_set = compute_dtype, True
            self.quant_storage, self.quant_state = storage, None
            device = linear.weight.device
            weights = linear.weight.numel()
            packed = torch.empty(weights // 2 // storage.itemsize, 1, dtype=storage, device=device)
            self.weight = nn.Parameter(packed, requires_grad=False)
            self.weight.compress_statistics, self.weight.quant_type = True, "nf4"
            blocks = -(-weights // BLOCK)
            for name, size, dtype in (
                ("absmax", blocks, torch.uint8),
                ("nested_absmax", -(-blocks // NESTED_BLOCK), torch.float32),
                ("nested_code", 256, torch.float32),
                ("code", 16, torch.float32),
                ("offset", 1, torch.float32),
            ):
                self.register_buffer(name, torch.empty(size, dtype=dtype, device=device), persistent=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            bias = self.bias if self.bias is None else self.bias.to(self.compute_dtype)
            return _Product.apply(inputs.to(self.compute_dtype), bias, self).to(inputs.dtype)

    return Packed

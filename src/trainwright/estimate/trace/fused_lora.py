"""LoRA over packed attention weights in one autograd function (fused_ops/unsloth_lora of fms-acceleration-foak)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainwright.estimate.trace.quantized import is_packed


class _Lora(torch.autograd.Function):
    """`LoRA_QKV` (three layers of one input, bnb/fast_lora.py and gptq/fast_lora.py) and `LoRA_W` (one).

    Keeps the input and what dropout left of it for each layer. Gradients of adapters come first, then that of the
    input, into which the products of the layers are added one by one.
    """

    @staticmethod
    def forward(ctx: Any, layers: Sequence[Any], inputs: torch.Tensor, *adapters: torch.Tensor) -> Any:
        results, kept = zip(*(_forward(layer, inputs) for layer in layers), strict=True)
        ctx.layers = layers
        ctx.save_for_backward(inputs, *adapters, *kept)
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        layers, count = ctx.layers, len(ctx.layers)
        inputs, *saved = ctx.saved_tensors
        adapters, kept = saved[: 2 * count], saved[2 * count :]
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in outer]
        rows = inputs.view(-1, inputs.shape[-1])
        gradients: list[torch.Tensor] = []
        for index, (gradient, left) in enumerate(zip(flat, kept, strict=True)):
            a, b = adapters[2 * index].t(), adapters[2 * index + 1].t()
            of_a = left.t() @ (gradient @ b.t())
            of_b = (a.t() @ left.t()) @ gradient
            of_a *= 1.0
            of_b *= 1.0
            gradients += [of_a.t(), of_b.t()]
        of_inputs = _into(rows, layers, flat[0])
        for index, (layer, gradient, left) in enumerate(zip(layers, flat, kept, strict=True)):
            if index > 0:
                weight = layer.base_layer.unpacked()
                of_inputs += gradient @ weight
                del weight
            a, b = adapters[2 * index].t(), adapters[2 * index + 1].t()
            of_inputs += (left != 0) * (gradient @ b.to(rows.dtype).t() @ (1.0 * a.to(rows.dtype).t()))
        return None, of_inputs.view(inputs.shape), *gradients


def _into(rows: torch.Tensor, layers: Sequence[Any], gradient: torch.Tensor) -> torch.Tensor:
    """Return the first product: of three nf4 layers it is written over their common input (`out = X`)."""
    base = layers[0].base_layer
    weight = base.unpacked()
    if len(layers) > 1 and hasattr(base, "quant_storage"):
        return torch.matmul(gradient, weight, out=rows)
    return gradient @ weight


def _forward(layer: Any, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`matmul_lora` (unsloth_lora/utils.py): return the result, and the rows that dropout left."""
    rows = inputs.view(-1, inputs.shape[-1])
    weight = layer.base_layer.unpacked()
    result = rows @ weight.t()
    del weight
    name = layer.active_adapters[0]
    rows = layer.lora_dropout[name](rows)
    a, b = layer.lora_A[name].weight.t(), layer.lora_B[name].weight.t()
    result += (rows @ a.to(inputs.dtype)) @ (1.0 * b.to(inputs.dtype))
    return result.view(*inputs.shape[:-1], -1), rows


def fuse(model: nn.Module) -> bool:
    """Fuse q, k and v, and o, of every attention whose packed layers all have adapters."""
    fused = False
    for attention in model.modules():
        layers: list[Any] = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        if all(hasattr(layer, "lora_A") and is_packed(layer.base_layer) for layer in layers):
            _fuse_three(layers[:3])
            layers[3].forward = lambda inputs, layer=layers[3]: _apply([layer], inputs)
            fused = True
    return fused


def _fuse_three(layers: Sequence[Any]) -> None:
    """models/utils.py (`_build_fused_forwards`): the first call computes all, the others take what is waiting."""
    waiting: dict[int, torch.Tensor] = {}

    def call(inputs: torch.Tensor, place: int) -> torch.Tensor:
        if not waiting:
            waiting.update(enumerate(_apply(layers, inputs)))
        return waiting.pop(place)

    for place, layer in enumerate(layers):
        layer.forward = lambda inputs, place=place: call(inputs, place)


def _apply(layers: Sequence[Any], inputs: torch.Tensor) -> Any:
    adapters = [
        matrix.weight
        for layer in layers
        for matrix in (layer.lora_A[layer.active_adapters[0]], layer.lora_B[layer.active_adapters[0]])
    ]
    return _Lora.apply(layers, inputs, *adapters)

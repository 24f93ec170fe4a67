"""Fused Triton kernels in place of a model's own code: what they keep for the backward pass, and what they allocate.

The kernels are unsloth's as the package fms-acceleration-foak 0.3 to 0.6 ships them (kernels/unsloth,
fused_ops/unsloth_lora, fused_ops/liger_ce), which pins older libraries than those that are traced, and of liger-kernel
0.5 to 0.8. So each is written down here as the memory that its Python side takes; the kernel itself only writes to
memory it is given. Most write over their inputs, which is why so little remains.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from trainwright.errors import UserError
from trainwright.estimate.request import Request
from trainwright.estimate.trace import fused_lora

FUSED_LOSS = "fms-acceleration"

_replaced: dict[tuple[Any, str], Any] = {}
"""Module and name of what was replaced, with the original."""


class _Norm(torch.autograd.Function):
    """kernels/unsloth/rms_layernorm.py: keeps the input and one fp32 number a row; writes over the gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = inputs.view(-1, inputs.shape[-1])
        output = torch.empty_like(rows)
        ctx.save_for_backward(rows, weight, torch.empty(rows.shape[0], device=rows.device))
        return output.view(inputs.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.saved_tensors  # under checkpointing, asking for them is what makes them again
        return gradient.view(gradient.shape), None


class _Rotary(torch.autograd.Function):
    """kernels/unsloth/rope_embedding.py: (batch, length, heads, head size), rotated in place; keeps nothing."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor) -> torch.Tensor:
        return heads.view(-1, heads.shape[2] * heads.shape[3]).view(heads.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        batch, length, heads, size = gradient.shape
        return gradient.reshape(batch * length, heads * size).view(gradient.shape)


class _Gate(torch.autograd.Function):
    """liger_kernel/ops/swiglu.py (`LigerSiLUMulFunction`): keeps both inputs, which become their gradients."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.saved_tensors


class _Loss(torch.autograd.Function):
    """kernels/unsloth/cross_entropy_loss.py: keeps the logits (rows, vocabulary), which become their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses, sums = (torch.empty(logits.shape[0], device=logits.device) for _ in range(2))
        ctx.save_for_backward(logits, sums, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits: torch.Tensor = ctx.saved_tensors[0]
        return logits, None


class _OutputLoss(torch.autograd.Function):
    """fused_ops/liger_ce/fused_linear_cross_entropy_loss.py: both gradients in the forward pass, rows by chunks."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows, size = hidden.shape
        autocast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if autocast else hidden.dtype
        chunks = -(-weight.shape[0] // size)
        chunk = 1 << (-(-rows // chunks) - 1).bit_length()
        weight_gradient = torch.zeros_like(weight) if weight.requires_grad else None
        hidden_gradient = torch.zeros_like(hidden)
        losses = torch.zeros(rows, device=hidden.device)
        learned = (labels != -100).sum()
        for begin in range(0, rows, chunk):
            part = hidden[begin : begin + chunk]
            logits = part @ weight.t()
            logits = logits.float()
            logits = logits.to(dtype)
            share = 1 / learned
            logits_gradient = logits * share
            hidden_gradient[begin : begin + chunk] = logits_gradient @ weight
            if weight_gradient is not None:
                torch.addmm(weight_gradient, logits.t(), part, out=weight_gradient)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient, weight_gradient, None


def fuse(model: nn.Module, request: Request) -> None:
    """Replace the parts of a model that `request.fused_kernels` names, and those only.

    Raises:
        UserError: the model has none of a part that is named.
    """
    while _replaced:
        (module, name), original = _replaced.popitem()
        setattr(module, name, original)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    done = {
        "norm": _fuse_norms,
        "rotary": _fuse_rotary,
        "mlp": _fuse_mlps,
        "loss": _fuse_loss,
        "output_loss": _fuse_output_loss,
        "lora": fused_lora.fuse,
    }
    for part in request.fused_kernels:
        if not done[part](base):
            raise UserError(f"fused_kernels: no fused kernel replaces {part} of a {type(base).__name__}")


def _replace(model: nn.Module, name: str, replacement: Any) -> bool:
    """Replace what the code of a model knows under a name, until another model is fused."""
    code = sys.modules[type(model).__module__]
    if not hasattr(code, name):
        return False
    _replaced[code, name] = getattr(code, name)
    setattr(code, name, replacement)
    return True


def _fuse_norms(model: Any) -> bool:
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms:
        norm.forward = lambda hidden, weight=norm.weight: _Norm.apply(hidden, weight)
    return bool(norms)


def _fuse_mlps(model: Any) -> bool:
    mlps = [m for m in model.modules() if all(hasattr(m, name) for name in ("gate_proj", "up_proj", "act_fn"))]
    for mlp in mlps:
        mlp.forward = lambda inputs, m=mlp: m.down_proj(_Gate.apply(m.gate_proj(inputs), m.up_proj(inputs)))
    return bool(mlps)


def _fuse_rotary(model: Any) -> bool:
    return _replace(model, "apply_rotary_pos_emb", _rotate)


def _rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return tuple(_Rotary.apply(heads.transpose(1, 2)).transpose(1, 2) for heads in (q, k))


def _fuse_loss(model: Any) -> bool:
    if not hasattr(model, "loss_function"):  # transformers before 4.46 makes logits fp32 in the model
        return _replace(model, "CrossEntropyLoss", lambda: _mean_loss)
    from transformers.loss.loss_utils import LOSS_MAPPING

    LOSS_MAPPING[FUSED_LOSS] = _causal_loss
    model.loss_type = FUSED_LOSS
    return True


def _causal_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    """`FastForCausalLMLoss`: logits in fp32 without the last position."""
    shifted = logits.float()[..., :-1, :].contiguous().view(-1, vocab_size)
    return _mean_loss(shifted, labels[..., 1:].contiguous().view(-1))


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = _Loss.apply(logits, labels)
    return losses.sum() / torch.count_nonzero(labels != -100)


def _fuse_output_loss(model: Any) -> bool:
    decoder, head = model.model, model.lm_head

    def forward(input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        hidden = decoder(input_ids=input_ids, **kwargs)[0][..., :-1, :].contiguous()
        labels = labels[..., 1:].contiguous().view(-1)
        return {"loss": _OutputLoss.apply(hidden.view(-1, hidden.shape[-1]), head.weight, labels)}

    model.forward = forward
    return True

"""FullyShardedDataParallel (FSDP1), as transformers' Trainer wraps a model with accelerate's fsdp_version 1."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import nn

from trainwright.estimate.request import Request
from trainwright.estimate.trace.model import DTYPES


def wrap(model: nn.Module, request: Request) -> nn.Module:
    """Wrap layer by layer; under adapters with the policy of peft, which the Trainer takes by itself."""
    import torch.distributed.fsdp._init_utils as init_utils
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    # torch/distributed/fsdp/_init_utils.py asks the accelerator for its current device.
    init_utils._get_compute_device = lambda *args, **kwargs: torch.device("cuda", 0)
    blocks = {type(m) for m in model.modules() if type(m).__name__ in set(getattr(model, "_no_split_modules", ()))}
    policy: Any = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks)
    if request.method.type != "full":
        from peft.utils.other import fsdp_auto_wrap_policy

        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(sorted(block.__name__ for block in blocks))
        policy = fsdp_auto_wrap_policy(model)
    alone: list[Any] = []
    if "lora" in request.fused_kernels:
        # Every rank keeps its adapters whole: fms_acceleration_foak/utils.py (`lora_adapters_switch_ddp_from_fsdp`).
        alone = [side for m in model.modules() if hasattr(m, "lora_A") for side in (m.lora_A, m.lora_B)]
    half = DTYPES[request.precision] if request.autocast and request.precision != "fp32" else None
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        device_id=torch.device("cuda", 0),
        ignored_modules=alone,
        use_orig_params=True,
        sync_module_states=True,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=None if half is None else MixedPrecision(half, half, half),
    )
    if half is not None:
        _upcast_trained(sharded)
    if request.checkpoint_around_unit and request.gradient_checkpointing != "none":
        _checkpoint_around_units(sharded, reentrant=request.gradient_checkpointing == "reentrant")
    _start(sharded)
    return sharded


def _checkpoint_around_units(model: nn.Module, *, reentrant: bool) -> None:
    """Checkpoint each unit instead of the layer in it (`GradientCheckpointingLayer`, transformers since 4.53)."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.utils.checkpoint import checkpoint

    for unit in FullyShardedDataParallel.fsdp_modules(model):
        layer: Any = unit.module
        if type(layer).__mro__[1].__name__ != "GradientCheckpointingLayer":
            continue
        layer.gradient_checkpointing = False

        def forward(*args: Any, _inner: Any = unit.forward, **kwargs: Any) -> Any:
            return checkpoint(functools.partial(_inner, **kwargs), *args, use_reentrant=reentrant)

        unit.forward = forward


def _start(model: nn.Module) -> None:
    """torch/distributed/fsdp/_runtime_utils.py: the first forward pass refuses a machine without GPUs, so begin here.

    Only meanwhile, as other libraries look for CUDA when they are imported.
    """
    from torch.distributed.fsdp._runtime_utils import _lazy_init

    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        _lazy_init(model, model)
    finally:
        torch.cuda.is_available = is_available


def _upcast_trained(model: nn.Module) -> None:
    """accelerate/accelerator.py (`prepare_model`): under mixed precision what is trained is kept in fp32."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for unit in FullyShardedDataParallel.fsdp_modules(model):
        flat = unit._flat_param if unit._has_params else None
        if flat is not None and flat.requires_grad and flat.dtype != torch.float32:
            flat.data = flat.data.to(torch.float32)
            unit._handle._orig_param_dtype = torch.float32

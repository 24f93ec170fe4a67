"""The torch versions whose internals the trace knows."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

import torch

from trainwright.errors import ExitCode, UserError

SUPPORTED_TORCH = ("2.11", "2.12", "2.13")
"""Versions whose traces a test compares with real steps; others are tried if all internals are there."""

PATCHED_INTERNALS = (
    "torch._subclasses.fake_tensor:FakeTensor.__torch_dispatch__",
    "torch._subclasses.fake_tensor:_DISPATCH_META_HANDLERS",
    "torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init",
    "torch._C:_ExcludeDispatchKeyGuard",
    "torch._C:_dispatch_has_kernel_for_dispatch_key",
    "torch._C:_current_graph_task_id",
    "torch._C:_storage_Use_Count",
    "torch:Tensor._use_count",
    "torch._C._nn:_parse_to",
    "torch.cuda.amp.common:amp_definitely_not_available",
    "torch.utils._foreach_utils:_get_foreach_kernels_supported_devices",
    "torch.nn:Module._apply",
    "torch.nn.init:trunc_normal_",
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._validate_no_meta_params",
    "torch.distributed.tensor._sharding_prop:ShardingPropagator.propagate_op_sharding_non_cached",
    "torch.nn.parallel.distributed:_verify_param_shape_across_processes",
    "torch.nn.parallel.distributed:_sync_module_states",
)
"""Names inside torch that the trace replaces or calls; each module that does so says why."""


def require_internals(internals: tuple[str, ...] = PATCHED_INTERNALS) -> None:
    """Check that this torch has every internal name that the trace relies on.

    Raises:
        UserError: names are missing; the message names the versions that have them.
    """
    missing = [name for name in internals if not _exists(name)]
    if missing:
        raise UserError(
            f"the traced step does not work with torch {torch.__version__}: its internals have changed",
            problems=[f"{name.replace(':', '.')} is missing" for name in missing],
            hints=[
                f"use a torch that the trace supports: {', '.join(SUPPORTED_TORCH)}",
                "the closed form answers without torch",
            ],
            exit_code=ExitCode.MISSING,
        )


def _exists(name: str) -> bool:
    module_name, _, attributes = name.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError:
        return False
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


def versions() -> dict[str, str]:
    """Return the versions of the libraries that decide what a step does."""
    found = {}
    for name in ("torch", "transformers", "peft", "accelerate", "bitsandbytes"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

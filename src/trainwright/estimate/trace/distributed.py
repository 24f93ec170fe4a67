"""DDP and FSDP as one rank of any number sees them, in one process.

The group is torch's fake one: collectives return at once, with whatever is in the output. It and the device mesh are
made before any fake tensor, as both work on real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainwright.estimate.request import Request
from trainwright.estimate.trace import streams
from trainwright.estimate.trace.model import DTYPES
from trainwright.estimate.trace.tracker import Tracker

_prepared = False


@contextmanager
def fake_group(request: Request) -> Iterator[Any]:
    """Open a group as rank 0; yield the device mesh of FSDP2, None for the rest."""
    if request.strategy == "single":
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if request.device == "cuda":
        streams.install(device_count=request.world_size)
    prepare_wrappers()
    dist.init_process_group("fake", rank=0, world_size=request.world_size, store=FakeStore())
    try:
        yield open_mesh(request)
    finally:
        dist.destroy_process_group()


def open_mesh(request: Request) -> Any:
    """Return the mesh that FSDP2 shards over; None for other strategies."""
    if request.strategy != "fsdp2":
        return None
    from torch.distributed.device_mesh import init_device_mesh

    pause_while_propagating()
    look_once_for_shards_of_shards()
    return init_device_mesh(request.device, (request.world_size,))


def pause_while_propagating() -> None:
    """torch/distributed/tensor/_sharding_prop.py runs operators on tensors of full size that no rank ever has."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    for name in ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"):
        original = getattr(ShardingPropagator, name, None)
        if original is None or hasattr(original, "__wrapped__"):
            continue

        def unseen(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            with Tracker.paused():
                return _original(*args, **kwargs)

        unseen.__wrapped__ = original  # type: ignore[attr-defined]
        setattr(ShardingPropagator, name, unseen)


def look_once_for_shards_of_shards() -> None:
    """torch 2.13 looks through all arguments of a foreach operator for each of them, which is a quarter of a trace.

    `_propagate_use_strided_shard_flag` (torch/distributed/tensor/_sharding_prop.py) has nothing to do where none is
    sharded twice.
    """
    from torch.distributed.tensor import _sharding_prop
    from torch.distributed.tensor.placement_types import _StridedShard

    original: Any = getattr(_sharding_prop, "_propagate_use_strided_shard_flag", None)
    if original is None or hasattr(original, "__wrapped__"):
        return
    seen: tuple[Any, bool] = (None, False)

    def where_there_are_any(strategy: Any, schema: Any) -> None:
        nonlocal seen
        if schema is not seen[0]:
            seen = schema, any(isinstance(p, _StridedShard) for spec in schema.args_spec for p in spec.placements)
        if seen[1]:
            original(strategy, schema)

    where_there_are_any.__wrapped__ = original  # type: ignore[attr-defined]
    _sharding_prop._propagate_use_strided_shard_flag = where_there_are_any


def wrap(model: nn.Module, request: Request, mesh: Any) -> nn.Module:
    """Hand the model to the strategy; FSDP2 shards it in place."""
    if request.strategy == "ddp":
        return _ddp(model, request)
    if request.strategy == "fsdp2":
        shard(model, request, mesh)
    elif request.strategy == "fsdp1":
        from trainwright.estimate.trace import fsdp1

        return fsdp1.wrap(model, request)
    return model


def shard(model: nn.Module, request: Request, mesh: Any) -> None:
    """Shard as trainwright/train/strategies/fsdp2.py: one unit for each block that transformers never splits."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = request.autocast and request.precision != "fp32"
    policy = MixedPrecisionPolicy(DTYPES[request.precision], torch.float32) if half else MixedPrecisionPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if not request.reshard_after_forward:
        options["reshard_after_forward"] = False  # left alone, torch keeps the outermost unit gathered, as the workers
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, **options)
    fully_shard(model, **options)


def synchronize_in(model: nn.Module, *, last: bool, each: bool) -> Any:
    """Exchange gradients in the last micro-batch only, or in `each`; return the context of the micro-batch."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last or each)
    elif hasattr(model, "no_sync") and not last:
        return model.no_sync()
    return nullcontext()


def _ddp(model: nn.Module, request: Request) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    # The workers let gradients be views of the buckets (trainwright/train/strategies/replicated.py), Trainer does not.
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=request.recipe == "trainwright")
    reduce_at_once(wrapped)
    return wrapped


def reduce_at_once(wrapped: Any) -> None:
    """Let DDP reduce its buckets with a group that does nothing."""
    # Without a hook the reducer asks the group's C++ work object for its result, which the fake group has not.
    wrapped.register_comm_hook(None, lambda state, bucket: _done_at_once(bucket.buffer()))
    # Rebuilding orders the buckets by arrival after the first step, through real index tensors; sizes stay the same.
    wrapped.__dict__["reducer"] = _WithoutRebuild(wrapped.reducer)


def _done_at_once(result: torch.Tensor) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return future


class _WithoutRebuild:
    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def prepare_wrappers() -> None:
    """Replace what FSDP2 and DDP check or exchange on real tensors."""
    global _prepared
    if _prepared:
        return
    _prepared = True
    import torch.nn.parallel.distributed as ddp
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor import DTensor

    # A fake tensor says `meta` to C++, which FSDP2 takes for a model that was never loaded.
    FSDPParamGroup._validate_no_meta_params = lambda self: None
    # A wrapper asks C++ for its device; its local tensor answers in Python.
    DTensor.device = property(lambda self: self._local_tensor.device)
    DTensor.is_cuda = property(lambda self: self._local_tensor.is_cuda)
    ddp._verify_param_shape_across_processes = lambda *args, **kwargs: True
    ddp._sync_module_states = lambda *args, **kwargs: None

"""FSDP2: every rank holds a slice of each parameter, gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainwright.job.schema import TrainSection
from trainwright.train.precision import COMPUTE_DTYPES
from trainwright.train.strategies.handing_out import take_own_rows, tie, ties
from trainwright.train.strategies.replicated import Replicated
from trainwright.train.strategies.states import (
    restore_state,
    saved_tensors,
    state_tensors,
    stored_name,
    trained_parameters,
)
from trainwright.train.tensors import TensorReader


class FullySharded(Replicated):
    """The model sharded layer by layer with `fully_shard`; stepping and loss scale are those of Replicated."""

    passes_are_collective = True

    def __init__(
        self,
        model: nn.Module,
        train: TrainSection,
        *,
        device: torch.device,
        precision: str,
        sync_each_micro_batch: bool = False,
    ) -> None:
        self._sync_each = sync_each_micro_batch
        shard(model, device=device, precision=precision)
        super().__init__(model, train, device=device, name="fsdp2", fp16=precision == "fp16")

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Reduce-scatter gradients in the last micro-batch only, or in each; either way they add up in fp32."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last or self._sync_each)
        return nullcontext()

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All-gather one tensor after the other."""
        for name, tensor in saved_tensors(self.module, adapters_only=self._adapters_only):
            yield stored_name(name), _whole(tensor)

    def gather_optimizer(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All-gather one state after the other."""
        for name, parameter in trained_parameters(self.module):
            for key, value in state_tensors(self.optimizer, parameter).items():
                yield f"{stored_name(name)}.{key}", _whole(value)

    def load_weights(self, reader: TensorReader) -> None:
        """Read this rank's rows of each tensor."""
        with torch.no_grad():
            for name, tensor in saved_tensors(self.module, adapters_only=self._adapters_only):
                if isinstance(tensor, DTensor):
                    tensor.to_local().copy_(_own_rows(reader, stored_name(name), tensor))
                else:
                    tensor.copy_(reader.whole(stored_name(name)))

    def load_optimizer(self, reader: TensorReader) -> None:
        """Read this rank's rows of each state."""
        for name, parameter in trained_parameters(self.module):
            assert isinstance(parameter, DTensor)

            def read(key: str, parameter: DTensor = parameter) -> torch.Tensor:
                whole_shape = reader.shape(key)
                if whole_shape != tuple(parameter.shape):
                    return reader.whole(key)
                rows = _own_rows(reader, key, parameter).to(parameter.device)
                return DTensor.from_local(
                    rows, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
                )

            restore_state(self.optimizer, parameter, stored_name(name), reader, read)

    def found(self) -> dict[str, str]:
        """Return what really runs."""
        sharded = all(isinstance(parameter, DTensor) for _, parameter in trained_parameters(self.module))
        return {"strategy": "fsdp2" if sharded and isinstance(self.module, FSDPModule) else "not sharded"}


def shard(model: nn.Module, *, device: torch.device, precision: str) -> None:
    """Shard `model` in place over all ranks; rank 0 holds the weights, the others may hold none (meta).

    One unit for each block that transformers never splits, and one for the rest. Rank 0 hands out the weights
    tensor by tensor, so that a node holds one copy of the model and not one for each rank. Of a base packed in 4 bits
    each rank has loaded its own rows already (`own_rows_only`): weights are bound to their scales, which stay whole.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    compute = COMPUTE_DTYPES[precision]
    policy = MixedPrecisionPolicy() if precision == "fp32" else MixedPrecisionPolicy(compute, torch.float32)
    own = take_own_rows(model)
    whole = {name: tensor.detach() for name, tensor in _all_tensors(model)} if dist.get_rank() == 0 else {}
    tied = ties(model)
    model.to("meta")
    tie(model, tied)
    _shard_units(model, mesh, policy)
    model.to_empty(device=device)
    tie(model, tied)
    with torch.no_grad():
        for name, tensor in _all_tensors(model):
            if name in own:
                assert isinstance(tensor, DTensor)
                tensor.to_local().copy_(own.pop(name))
                continue
            source = (
                whole.pop(name).to(device)
                if name in whole
                else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            )
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(distribute_tensor(source, tensor.device_mesh, tensor.placements).to_local())
            else:
                dist.broadcast(source, src=0)
                tensor.copy_(source)


def _shard_units(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _own_rows(reader: TensorReader, name: str, like: DTensor) -> torch.Tensor:
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return reader.rows(name, offset[0], offset[0] + shape[0])

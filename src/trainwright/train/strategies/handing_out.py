"""A model from rank 0 to the devices of all ranks, so that a node holds one copy of it in host memory at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

WHOLE_SHAPE = "whole_shape"
"""Attribute of a parameter that holds some rows of it only."""


def hand_out(
    model: nn.Module, device: torch.device, *, dtype: torch.dtype, take: Callable[[nn.Parameter], None]
) -> None:
    """Bring the model of rank 0 to `device` on every rank, tensor by tensor; the others may hold none (meta).

    Floating parameters become `dtype`. `take` gets each parameter on its device, where only that of rank 0 has values,
    and passes them on: to all ranks whole, or to each its part. Rank 0 lets go of what has been passed on.
    """
    first = dist.get_rank() == 0
    tied = ties(model)
    for name in [name for name, _ in model.named_parameters()]:
        parameter = model.get_parameter(name)
        wanted = dtype if parameter.is_floating_point() else parameter.dtype
        on_device = (
            parameter.detach().to(device, wanted)
            if first
            else torch.empty(parameter.shape, dtype=wanted, device=device)
        )
        arrived = nn.Parameter(on_device, requires_grad=parameter.requires_grad)
        del parameter, on_device
        replace(model, name, arrived)
        take(arrived)
    tie(model, tied)
    for name in [name for name, _ in model.named_buffers()]:
        buffer = model.get_buffer(name)
        whole = buffer.to(device) if first else torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        dist.broadcast(whole, src=0)
        replace(model, name, whole)


@contextmanager
def own_rows_only(rank: int, ranks: int) -> Iterator[None]:
    """Let parameters that transformers loads meanwhile keep the rows that FSDP2 gives to this rank, and no others.

    Cut is each as it is put into its module, packed or not, before the next one is read.
    """

    def cut(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # Only weights of the checkpoint: what is missing in it is initialized whole, as on one rank.
        if parameter is None or not getattr(parameter, "_is_hf_initialized", False) or hasattr(parameter, WHOLE_SHAPE):
            return
        setattr(parameter, WHOLE_SHAPE, parameter.shape)
        rows = -(-parameter.shape[0] // ranks)
        parameter.data = parameter.data[rank * rows : (rank + 1) * rows].clone()

    handle = nn.modules.module.register_module_parameter_registration_hook(cut)
    try:
        yield
    finally:
        handle.remove()


def take_own_rows(model: nn.Module) -> dict[str, torch.Tensor]:
    """Take the rows that `own_rows_only` has left out of the model, by name; whole parameters on meta stay in it."""
    tied = ties(model)
    found = {}
    for name, parameter in list(model.named_parameters()):
        shape = getattr(parameter, WHOLE_SHAPE, None)
        if shape is not None:
            found[name] = parameter.data
            whole = torch.empty(shape, dtype=parameter.dtype, device="meta")
            replace(model, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    tie(model, tied)
    return found


def ties(model: nn.Module) -> dict[str, str]:
    """Return the second names of parameters that have several (tied embeddings), each with the first name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in everywhere if first[id(parameter)] != name}


def tie(model: nn.Module, tied: dict[str, str]) -> None:
    """Make tied names one parameter again; moving a module to another device gives each name its own."""
    for name, first in tied.items():
        replace(model, name, model.get_parameter(first))


def replace(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a parameter or a buffer in the place of another."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, tensor)

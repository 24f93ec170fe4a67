"""Names under which weights and optimizer states go to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from trainwright.train.tensors import TensorReader


def trained_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are trained, by name."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def saved_tensors(module: nn.Module, *, adapters_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a checkpoint holds of a model: all parameters and persistent buffers, or the adapters only."""
    if adapters_only:
        yield from trained_parameters(module)
        return
    yield from module.named_parameters()
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield name, buffer


def stored_name(name: str) -> str:
    """Return the name of a parameter on disk; peft leaves the adapter's own name out of its files."""
    return name.replace(".default.", ".")


def state_tensors(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Return the tensors of one parameter's optimizer state; numbers become 0-dimensional tensors."""
    return {
        key: value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor | int | float)
    }


def stored_states(reader: TensorReader, name: str) -> list[str]:
    """Return the keys of the optimizer state stored for one parameter."""
    prefix = f"{name}."
    return sorted(key.removeprefix(prefix) for key in reader.names if key.rpartition(".")[0] == name)


def restore_state(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    name: str,
    reader: TensorReader,
    read: Callable[[str], torch.Tensor],
) -> None:
    """Fill one parameter's optimizer state from a checkpoint, each tensor as `read` returns it.

    transformers' Adafactor counts its steps in a plain number; torch's optimizers in a tensor on the device.
    """
    state: dict[str, object] = {}
    for key in stored_states(reader, name):
        tensor = read(f"{name}.{key}")
        state[key] = int(tensor) if tensor.dtype == torch.float64 else tensor.to(parameter.device)
    optimizer.state[parameter] = state

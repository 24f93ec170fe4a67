"""How fast a rank computes, told apart from how long it waits for others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Stopwatch:
    """Times the forward passes of a model's own layers; on CUDA between events, so that nothing waits.

    Layers are the blocks that transformers never splits. No strategy communicates inside one, but for ZeRO-3, which
    gathers parameters module by module: there the innermost modules are timed.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, gathers_inside_blocks: bool) -> None:
        self._layers = _innermost(module) if gathers_inside_blocks else _blocks(module) or _innermost(module)
        self._device = device
        self._began: list[Any] = []
        self._timed: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what runs inside."""
        # Behind the hook with which FSDP2 and DeepSpeed wait for parameters, and before the one that lets them go.
        hooks = [layer.register_forward_pre_hook(self._begin) for layer in self._layers]
        hooks += [layer.register_forward_hook(self._end, prepend=True) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take_s(self) -> float:
        """Return the seconds timed since the last call; waits for the device to have done them."""
        timed, self._timed = self._timed, []
        self._began.clear()  # recomputing ends in the midst of a layer, once it has all that it needs
        if self._device.type != "cuda":
            return float(sum(ended - began for began, ended in timed))
        if timed:
            timed[-1][1].synchronize()
        return float(sum(began.elapsed_time(ended) for began, ended in timed)) / 1000

    def _begin(self, *_: Any) -> None:
        self._began.append(self._moment())

    def _end(self, *_: Any) -> None:
        self._timed.append((self._began.pop(), self._moment()))

    def _moment(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _blocks(module: nn.Module) -> list[nn.Module]:
    names = set(getattr(module, "_no_split_modules", None) or ())
    # By all its classes: fully_shard gives a sharded block a class of its own, below the block's.
    return [layer for layer in module.modules() if names.intersection(kind.__name__ for kind in type(layer).__mro__)]


def _innermost(module: nn.Module) -> list[nn.Module]:
    with_parameters = (layer for layer in module.modules() if next(layer.parameters(), None) is not None)
    return [layer for layer in with_parameters if next(layer.children(), None) is None]

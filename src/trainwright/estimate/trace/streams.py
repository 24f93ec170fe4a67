"""Streams and events of torch.cuda without a device, as FSDP2, DDP and FSDP1 use them.

Two things about a stream matter here. The allocator keeps memory of different streams apart; and memory that another
stream has used (`record_stream`) can only be taken again when the GPU has come to where it was freed. The process runs
ahead of a busy GPU, so this is known only where it waits: for an event, for a stream, for a number. Work is taken to be
done in the order in which it was given out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_installed = False


class Observer(Protocol):
    """Who keeps account of the memory."""

    def position(self) -> int:
        """Return how much has been given out to the GPU so far."""

    def reached(self, position: int) -> None:
        """Learn that the GPU has done all that was given out up to a position."""

    def used_on(self, tensor: torch.Tensor, stream: int) -> None:
        """Learn that a stream uses a tensor's memory."""


_observers: list[Observer] = []


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tell an observer meanwhile."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class InstantEvent:
    """An event for which nobody waits in vain."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._positions: list[int] = []

    def record(self, *args: Any) -> None:
        """Remember what has been given out so far."""
        self._positions = [observer.position() for observer in _observers]

    def wait(self, *args: Any) -> None:
        """Do nothing: a stream waits, not the process."""

    def synchronize(self) -> None:
        """Wait until the GPU has come to where the event was recorded."""
        for observer, position in zip(_observers, self._positions, strict=False):
            observer.reached(position)

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def elapsed_time(self, end: InstantEvent) -> float:
        """Return a millisecond: no time passes here."""
        return 1.0


class Stream:
    """A stream with a number; 0 is the default one."""

    _count = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = Stream._count
        Stream._count += 1
        self.device, self.device_index = torch.device("cuda", 0), 0

    def wait_stream(self, other: Stream) -> None:
        """Do nothing."""

    def wait_event(self, event: InstantEvent) -> None:
        """Do nothing."""

    def record_event(self, event: InstantEvent | None = None) -> InstantEvent:
        """Return the event, or a new one, recorded."""
        event = event or InstantEvent()
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait for all that was given out."""
        wait()

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Return False: there are no CUDA graphs here."""
        return False

    def __enter__(self) -> Stream:
        _entered.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _entered.pop()


_entered = [Stream()]


def current_number() -> int:
    """Return the number of the stream that allocations now belong to."""
    return _entered[-1].stream_id


def wait(device: Any = None) -> None:
    """Wait for all that was given out to the GPU."""
    for observer in _observers:
        observer.reached(observer.position())


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    for observer in _observers:
        observer.used_on(tensor, stream.stream_id)


@contextmanager
def _using(stream: Stream | None) -> Iterator[None]:
    _entered.append(stream or _entered[-1])
    try:
        yield
    finally:
        _entered.pop()


def install(device_count: int) -> None:
    """Let torch.cuda and torch.accelerator answer as with one current device, for this process."""
    global _installed
    cuda = torch.cuda
    cuda.device_count = lambda: device_count
    if _installed:
        return
    _installed = True
    cuda.Stream, cuda.Event, torch.Event = Stream, InstantEvent, InstantEvent
    cuda.current_stream = lambda device=None: _entered[-1]
    cuda.default_stream = lambda device=None: _entered[0]
    cuda.stream = cuda.StreamContext = _using
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.synchronize = wait
    cuda.is_initialized = lambda: False
    cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.record_stream = _record_stream
    accelerator = torch.accelerator
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    accelerator.current_device_index = lambda: 0
    accelerator.set_device_index = lambda index: None
    accelerator.current_stream = lambda device=None: _entered[-1]
    torch._C._accelerator_getDeviceIndex = lambda: 0

"""Streams and events of torch.cuda without a device, as FSDP2, DDP and FSDP1 use them.

Only one thing about a stream matters here: the allocator keeps memory of different streams apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_installed = False


class Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        """Do nothing."""

    def wait(self, *args: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True: all work is done."""
        return True


class Stream:
    """A stream with a number; 0 is the default one."""

    _count = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = Stream._count
        Stream._count += 1
        self.device, self.device_index = torch.device("cuda", 0), 0

    def wait_stream(self, other: Stream) -> None:
        """Do nothing."""

    def wait_event(self, event: Event) -> None:
        """Do nothing."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return the event, or a new one."""
        return event or Event()

    def synchronize(self) -> None:
        """Do nothing."""

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
    cuda.Stream, cuda.Event, torch.Event = Stream, Event, Event
    cuda.current_stream = lambda device=None: _entered[-1]
    cuda.default_stream = lambda device=None: _entered[0]
    cuda.stream = cuda.StreamContext = _using
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.is_initialized = lambda: False
    cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.record_stream = lambda self, stream: None
    accelerator = torch.accelerator
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    accelerator.current_device_index = lambda: 0
    accelerator.set_device_index = lambda index: None
    accelerator.current_stream = lambda device=None: _entered[-1]
    torch._C._accelerator_getDeviceIndex = lambda: 0

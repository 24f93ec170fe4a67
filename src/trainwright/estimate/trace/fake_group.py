"""The process group of a script that is rank 0 of several, as torchrun would have started it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from trainwright.estimate.script_request import ScriptRequest
from trainwright.estimate.trace.distributed import pause_while_propagating, prepare_wrappers, reduce_at_once


@contextmanager
def joined(request: ScriptRequest) -> Iterator[None]:
    """Let the script find torchrun's variables, and a group that it opens be torch's fake one."""
    if request.world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(request.world_size),
        "LOCAL_WORLD_SIZE": str(request.local_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    prepare_wrappers()
    pause_while_propagating()
    original, wrap = dist.init_process_group, DistributedDataParallel.__init__

    def open_group(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            original("fake", rank=0, world_size=request.world_size, store=FakeStore())

    def wrap_and_reduce(self: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs)
        reduce_at_once(self)

    dist.init_process_group = dist.distributed_c10d.init_process_group = open_group
    DistributedDataParallel.__init__ = wrap_and_reduce
    try:
        yield
    finally:
        dist.init_process_group = dist.distributed_c10d.init_process_group = original
        DistributedDataParallel.__init__ = wrap
        if dist.is_initialized():
            dist.destroy_process_group()

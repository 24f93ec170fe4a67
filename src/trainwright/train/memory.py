"""What a rank says when its memory runs out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

import torch

from trainwright.errors import UserError
from trainwright.out_of_memory import Doing, OutOfMemoryError, is_out_of_memory, reason_in


class RunningOut(AbstractContextManager["RunningOut"]):
    """Turns whatever runs out of memory inside into OutOfMemoryError, with what the rank was doing."""

    def __init__(self, doing: Doing, device: torch.device) -> None:
        self._doing, self._device = doing, device

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise OutOfMemoryError from an error that means it; leave every other as it is."""
        if error is not None and not isinstance(error, UserError) and is_out_of_memory(error):
            raise OutOfMemoryError(self._doing, reason_in(error), device_figures(self._device)) from error


def device_figures(device: torch.device) -> str | None:
    """Return what is free on a GPU and what torch holds of it; None off CUDA, or where CUDA no longer answers."""
    if device.type != "cuda":
        return None
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        return None
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    peak = torch.cuda.max_memory_allocated(device)
    gib = [f"{size / 2**30:.2f}" for size in (free, total, used, held, peak)]
    return (
        f"{torch.cuda.get_device_name(device)}: {gib[0]} of {gib[1]} GiB free; torch has {gib[2]} GiB allocated, "
        f"{gib[3]} reserved, {gib[4]} allocated at its peak"
    )

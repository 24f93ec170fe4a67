"""Which prompts go into one batch: those of like length together, and as many as memory holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainwright.anatomy import Anatomy
from trainwright.estimate.inference import cache_bytes, pass_bytes
from trainwright.hardware.reading import GIB, MIB

UNKNOWN_MODEL_BATCH = 16
"""Where the dimensions of a model are not known here; too many are halved as memory runs out."""
MOST_ON_CPU = 16
"""32 answer no more a second, and are padded more (benchmarks/evaluate_batching.py)."""
MOST_ON_GPU = 256
"""Assumed, not measured: of static batches, as where layers are spread; continuous ones have a limit of their own."""
USED_SHARE = 0.85
"""Of what is free: keys and values are copied as they grow, one layer at a time, and the allocator leaves gaps."""


@dataclass(frozen=True)
class Room:
    """Free memory, and what a prompt takes of it: the keys and values of its tokens, and its part of a pass."""

    free_bytes: Callable[[], int]
    anatomy: Anatomy | None
    dtype: str
    most: int

    def prompts(self, length: int) -> int:
        """Return how many prompts of `length` tokens, answer included, fit now; at least one."""
        if self.anatomy is None:
            return min(UNKNOWN_MODEL_BATCH, self.most)
        return max(1, min(self.most, int(self.free_bytes() * USED_SHARE) // self.prompt_bytes(length)))

    def prompt_bytes(self, length: int) -> int:
        """Return what one prompt of `length` tokens takes, an estimate; needs the anatomy."""
        assert self.anatomy is not None
        return cache_bytes(self.anatomy, self.dtype, 1, length) + pass_bytes(self.anatomy, self.dtype, 1, length)

    def reason(self, length: int) -> str:
        """Say why as many are taken at a time as `prompts` says."""
        count = self.prompts(length)
        if self.anatomy is None:
            return f"batches of {count}: the dimensions of the model are not known here"
        each, free = self.prompt_bytes(length) / MIB, self.free_bytes() / GIB
        limit = f"; more than {self.most} are no faster" if count == self.most else ""
        return f"batches of {count}: {each:.1f} MiB a prompt of {length} tokens (estimate), {free:.1f} GiB free{limit}"


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the numbers of the prompts, the longest first: a batch too large shows at once, and little is padded."""
    return sorted(range(len(lengths)), key=lambda number: -lengths[number])


def shared_prefix(sequences: Sequence[list[int]]) -> int:
    """Return how many tokens all sequences begin with alike; one at least of each is left to go on from."""
    first, last = min(sequences), max(sequences)
    shortest = min(map(len, sequences))
    alike = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), shortest)
    return min(alike, shortest - 1)

"""Where the CUDA driver puts what it is asked for: of two free blocks of one size the allocator takes the lower one.

Seen on an H200 (driver 580.159) in the histories of `benchmarks/gpu/histories.py`: whole chunks of 32 MiB, each below
all before it or in the highest gap that holds it, as Linux hands out addresses (`mmap`, top down); what is smaller than
a chunk shares one, upwards.
"""

from __future__ import annotations

MIB = 1 << 20
CHUNK_BYTES = 32 * MIB
_TOP = 1 << 47


class Addresses:
    """Of one GPU; nothing is ever out of room."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, int]] = [(0, _TOP)]
        """Begin and end of what is not taken, in whole chunks, the highest first."""
        self._shared: dict[int, list[int]] = {}
        """For each chunk that small ones share: where its free end begins, and how many are in it."""
        self._taken: dict[int, int] = {}

    def take(self, size_bytes: int) -> int:
        """Return where `size_bytes` begin."""
        if size_bytes >= CHUNK_BYTES:
            start = self._below(-(-size_bytes // CHUNK_BYTES) * CHUNK_BYTES)
        else:
            start = self._within_a_chunk(size_bytes)
        self._taken[start] = size_bytes
        return start

    def give_back(self, start: int) -> None:
        """Let the addresses that begin at `start` be taken again; of a shared chunk when nothing is left in it."""
        size_bytes = self._taken.pop(start)
        if size_bytes >= CHUNK_BYTES:
            self._open(start, start + -(-size_bytes // CHUNK_BYTES) * CHUNK_BYTES)
            return
        chunk = start // CHUNK_BYTES * CHUNK_BYTES
        self._shared[chunk][1] -= 1
        if not self._shared[chunk][1]:
            del self._shared[chunk]
            self._open(chunk, chunk + CHUNK_BYTES)

    def _within_a_chunk(self, size_bytes: int) -> int:
        for chunk, shared in self._shared.items():
            if shared[0] + size_bytes <= chunk + CHUNK_BYTES:
                break
        else:
            chunk = self._below(CHUNK_BYTES)
            shared = self._shared[chunk] = [chunk, 0]
        start = shared[0]
        self._shared[chunk] = [start + size_bytes, shared[1] + 1]
        return start

    def _below(self, size_bytes: int) -> int:
        index = next(i for i, (begin, end) in enumerate(self._gaps) if end - begin >= size_bytes)
        begin, end = self._gaps.pop(index)
        if end - size_bytes > begin:
            self._gaps.insert(index, (begin, end - size_bytes))
        return end - size_bytes

    def _open(self, begin: int, end: int) -> None:
        gaps: list[tuple[int, int]] = []
        for gap in sorted([*self._gaps, (begin, end)], reverse=True):
            if gaps and gaps[-1][0] == gap[1]:
                gaps[-1] = (gap[0], gaps[-1][1])
            else:
                gaps.append(gap)
        self._gaps = gaps

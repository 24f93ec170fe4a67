"""What PyTorch's caching allocator takes from a GPU for a sequence of allocations and frees; no torch needed.

Reserved memory decides whether a job runs out of memory, and differs from what tensors hold by rounding, by blocks
cached in the wrong size, and by fragments. Rules and constants: c10/cuda/CUDACachingAllocator.cpp of torch 2.13
(`round_size`, `get_free_block`, `should_split`, `alloc_block`, `release_cached_blocks`, `map_block`, `unmap_block`),
with the default configuration: no max_split_size_mb, no power-of-two rounding, no garbage collection threshold.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from trainwright.estimate.addresses import Addresses

KIB, MIB = 1 << 10, 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_REQUEST_BYTES = 10 * MIB
OWN_SEGMENT_ROUNDING_BYTES = 2 * MIB

_ADDRESS_SPACE = 1 << 40
"""Of an expandable segment; torch reserves 9/8 of the card and opens another when that is used up, with one effect."""


class Event(NamedTuple):
    """One allocation (`size_bytes` > 0) or free (`size_bytes` < 0) of the memory called `key`.

    Memory that other streams still use when it is freed (`held`) cannot be taken again until an event of 0 bytes.
    """

    key: int
    size_bytes: int
    stream: int = 0
    held: bool = False


@dataclass(slots=True, eq=False)
class _Block:
    start: int
    size: int
    pool: _Pool
    base: int
    """Where its segment begins."""
    mapped: bool = True
    used: bool = False
    previous: _Block | None = None
    next: _Block | None = None


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one kind (small or large) and one stream; `unmapped` holds address space without memory."""

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    unmapped: list[int] = field(default_factory=list)

    @property
    def page_bytes(self) -> int:
        return SMALL_SEGMENT_BYTES if self.small else LARGE_SEGMENT_BYTES


class CachingAllocator:
    """The allocator of one GPU; all figures in bytes.

    `capacity_bytes` is what this process may reserve: the card, less the CUDA context and what others use. When a
    request does not fit, cached memory is given back and the request tried again (`retries`); if that does not help
    `out_of_memory` is set and the request is granted all the same, so that the peak says what would be needed.
    """

    def __init__(self, *, expandable_segments: bool = False, capacity_bytes: int | None = None) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = 0
        """In blocks, as `torch.cuda.memory_allocated` counts: rounded up, with what was too small to split off."""
        self.requested_bytes = self.peak_requested_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self.out_of_memory = False
        self._expandable = expandable_segments
        self._capacity = capacity_bytes
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._blocks: dict[int, _Block] = {}
        self._live: dict[int, tuple[_Block, int]] = {}
        self._held: dict[int, _Block] = {}
        self._addresses = Addresses()

    def allocate(self, key: int, size_bytes: int, stream: int = 0) -> None:
        """Take `size_bytes` under a name not in use; nothing at all happens for 0 bytes."""
        if size_bytes == 0:
            return
        assert key not in self._live, key
        size = -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        kind = size <= SMALL_REQUEST_BYTES, stream
        pool = self._pools.get(kind)
        if pool is None:
            pool = self._pools[kind] = _Pool(kind[0])
        block = self._best_fit(pool, size) or self._from_device(pool, size)
        if block.size != size:
            self._split(block, size)
        block.used = True
        self._live[key] = (block, size_bytes)
        self.allocated_bytes += block.size
        self.requested_bytes += size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes

    def free(self, key: int, *, held: bool = False) -> None:
        """Give back what is kept under a name; 0-byte allocations are unknown and ignored.

        With `held` it no longer counts as allocated, but stays taken until `let_go` (`insert_events`).
        """
        kept = self._live.pop(key, None)
        if kept is None:
            return
        block, size_bytes = kept
        self.allocated_bytes -= block.size
        self.requested_bytes -= size_bytes
        if held:
            self._held[key] = block
        else:
            self._release(block)

    def let_go(self, key: int) -> None:
        """Let memory be taken again that was freed while other streams used it; names not held are ignored."""
        block = self._held.pop(key, None)
        if block is not None:
            self._release(block)

    def release_cached(self) -> None:
        """Give back to the device every segment, or page of an expandable segment, in which nothing is used.

        Other streams are waited for first (`synchronize_and_free_events`).
        """
        for key in list(self._held):
            self.let_go(key)
        for pool in self._pools.values():
            for size, start in list(pool.free):
                block = self._blocks[start]
                if self._expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.free.remove((size, start))
                    del self._blocks[start]
                    self._addresses.give_back(start)
                    self.reserved_bytes -= size

    def _release(self, block: _Block) -> None:
        block.used = False
        self._store(self._merged(block))

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        index = bisect_left(pool.free, (size, 0))
        if index == len(pool.free):
            return None
        if self._expandable:
            # A block before unmapped space counts with that space, which keeps room to grow for larger requests.
            while index + 1 < len(pool.free) and self._reach(pool.free[index + 1]) < self._reach(pool.free[index]):
                index += 1
        return self._blocks[pool.free.pop(index)[1]]

    def _reach(self, entry: tuple[int, int]) -> int:
        after = self._blocks[entry[1]].next
        return entry[0] + (after.size if after is not None and not after.mapped else 0)

    def _from_device(self, pool: _Pool, size: int) -> _Block:
        take = self._grow if self._expandable else self._new_segment
        block = take(pool, size, self._capacity)
        if block is None:
            self.retries += 1
            self.release_cached()
            block = take(pool, size, self._capacity)
        if block is None:
            self.out_of_memory = True
            block = take(pool, size, None)
        assert block is not None
        return block

    def _new_segment(self, pool: _Pool, size: int, capacity: int | None) -> _Block | None:
        if size <= SMALL_REQUEST_BYTES:
            segment = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_REQUEST_BYTES:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = _round_up(size, OWN_SEGMENT_ROUNDING_BYTES)
        if not self._reserve(segment, capacity):
            return None
        base = self._addresses.take(segment)
        block = _Block(base, segment, pool, base)
        self._blocks[base] = block
        return block

    def _grow(self, pool: _Pool, size: int, capacity: int | None) -> _Block | None:
        """Map pages behind a free block, or in the first unmapped space, until the block is large enough."""
        block = self._growable(pool, size)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size), capacity)
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            after = block.next
            assert after is not None
            mapped = self._map(after, min(size - block.size, after.size), capacity)
            if mapped is None:
                return None
            block = mapped
        pool.free.remove((block.size, block.start))
        return block

    def _growable(self, pool: _Pool, size: int) -> _Block:
        for start in pool.unmapped:
            first = self._blocks[start]
            if first.previous is not None and not first.previous.used:
                first = first.previous
            room, block = 0, first
            while room < size and not block.used:
                room += block.size
                if block.next is None:
                    break
                block = block.next
            if room >= size:
                return first
        base = self._addresses.take(_ADDRESS_SPACE)
        block = _Block(base, _ADDRESS_SPACE, pool, base, mapped=False)
        self._blocks[base] = block
        insort(pool.unmapped, base)
        return block

    def _map(self, block: _Block, size: int, capacity: int | None) -> _Block | None:
        """Back the beginning of an unmapped block with memory, in whole pages; return the free block it becomes."""
        page = block.pool.page_bytes
        size = min(block.size, _round_up(block.start - block.base + size, page) - (block.start - block.base))
        if not self._reserve(size, capacity):
            return None
        block.pool.unmapped.remove(block.start)
        self._cut(block, size)
        block.mapped = True
        merged = self._merged(block)
        self._store(merged)
        return merged

    def _unmap(self, block: _Block) -> None:
        page = block.pool.page_bytes
        first = _round_up(block.start - block.base, page) + block.base
        end = (block.start + block.size - block.base) // page * page + block.base
        if end <= first:
            return
        block.pool.free.remove((block.size, block.start))
        if first > block.start:
            rest = self._cut(block, first - block.start)
            assert rest is not None
            self._store(block)
            block = rest
        if block.start + block.size > end:
            self._store(self._cut(block, end - block.start))
        self.reserved_bytes -= block.size
        block.mapped = False
        self._store(self._merged(block))

    def _reserve(self, size: int, capacity: int | None) -> bool:
        if capacity is not None and self.reserved_bytes + size > capacity:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        fine_grained = block.pool.small or self._expandable
        if rest >= MIN_BLOCK_BYTES if fine_grained else rest > SMALL_REQUEST_BYTES:
            self._store(self._cut(block, size))

    def _cut(self, block: _Block, size: int) -> _Block | None:
        """Leave `size` bytes to the block; return the rest as a new one, or None if there is no rest."""
        if block.size == size:
            return None
        rest = _Block(block.start + size, block.size - size, block.pool, block.base, block.mapped)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        self._blocks[rest.start] = rest
        if not rest.mapped:
            insort(rest.pool.unmapped, rest.start)
        return rest

    def _merged(self, block: _Block) -> _Block:
        """Join the block with free neighbours of its kind, which leave their lists; return the result."""
        after, before = block.next, block.previous
        if after is not None and not after.used and after.mapped == block.mapped:
            self._unlist(after)
            self._absorb(block, after)
        if before is not None and not before.used and before.mapped == block.mapped:
            self._unlist(before)
            self._absorb(before, block)
            return before
        return block

    def _absorb(self, block: _Block, after: _Block) -> None:
        block.size += after.size
        block.next = after.next
        if after.next is not None:
            after.next.previous = block
        del self._blocks[after.start]

    def _store(self, block: _Block | None) -> None:
        assert block is not None
        if block.mapped:
            insort(block.pool.free, (block.size, block.start))
        else:
            insort(block.pool.unmapped, block.start)

    def _unlist(self, block: _Block) -> None:
        if block.mapped:
            entry = (block.size, block.start)
            index = bisect_left(block.pool.free, entry)
            assert block.pool.free[index] == entry
            block.pool.free.pop(index)
        else:
            block.pool.unmapped.remove(block.start)


def replay(
    events: Iterable[Event], *, expandable_segments: bool = False, capacity_bytes: int | None = None
) -> CachingAllocator:
    """Return the allocator after all `events`; what a key of 0 bytes or an unknown key does is nothing."""
    allocator = CachingAllocator(expandable_segments=expandable_segments, capacity_bytes=capacity_bytes)
    for key, size_bytes, stream, held in events:
        if size_bytes > 0:
            allocator.allocate(key, size_bytes, stream)
        elif size_bytes < 0:
            allocator.free(key, held=held)
        else:
            allocator.let_go(key)
    return allocator


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

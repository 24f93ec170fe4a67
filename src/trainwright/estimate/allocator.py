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


class MemoryEvent(NamedTuple):
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

    def absorb(self, after: _Block) -> None:
        """Become one with the block behind it."""
        self.size += after.size
        self.next = rest = after.next
        if rest is not None:
            rest.previous = self

    def cut(self, size: int) -> _Block:
        """Keep `size` bytes; return the rest as a block of its own."""
        after = self.next
        rest = _Block(self.start + size, self.size - size, self.pool, self.base, self.mapped, False, self, after)
        if after is not None:
            after.previous = rest
        self.next, self.size = rest, size
        return rest


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one kind (small or large) and one stream, by size and address."""

    page_bytes: int
    least_rest_bytes: int
    """What a block must have left to be cut in two."""
    free: list[tuple[int, int, _Block]] = field(default_factory=list)
    unmapped: list[tuple[int, _Block]] = field(default_factory=list)
    """Address space without memory, of expandable segments."""


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
        self._small: dict[int, _Pool] = {}
        self._large: dict[int, _Pool] = {}
        """Pools by stream."""
        self._live: dict[int, tuple[_Block, int]] = {}
        self._held: dict[int, _Block] = {}
        self._addresses = Addresses()

    def allocate(self, key: int, size_bytes: int, stream: int = 0) -> None:
        """Take `size_bytes` under a name not in use; nothing at all happens for 0 bytes."""
        if size_bytes == 0:
            return
        assert key not in self._live, key
        size = (size_bytes + MIN_BLOCK_BYTES - 1) // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES
        pools = self._small if size <= SMALL_REQUEST_BYTES else self._large
        pool = pools.get(stream) or self._open(pools, stream)
        index = bisect_left(pool.free, (size,))
        if index == len(pool.free):
            block = self._from_device(pool, size)
        else:
            block = pool.free.pop(self._roomiest(pool, index) if self._expandable else index)[2]
        if block.size - size >= pool.least_rest_bytes:
            rest = block.cut(size)
            insort(pool.free, (rest.size, rest.start, rest))
        block.used = True
        self._live[key] = (block, size_bytes)
        self.allocated_bytes = allocated = self.allocated_bytes + block.size
        self.requested_bytes = requested = self.requested_bytes + size_bytes
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        if requested > self.peak_requested_bytes:
            self.peak_requested_bytes = requested

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
        for pool in (*self._small.values(), *self._large.values()):
            for entry in list(pool.free):
                size, start, block = entry
                if self._expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.free.remove(entry)
                    self._addresses.give_back(start)
                    self.reserved_bytes -= size

    def _open(self, pools: dict[int, _Pool], stream: int) -> _Pool:
        small = pools is self._small
        least_rest = MIN_BLOCK_BYTES if small or self._expandable else SMALL_REQUEST_BYTES + 1
        pool = pools[stream] = _Pool(SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES, least_rest)
        return pool

    def _roomiest(self, pool: _Pool, index: int) -> int:
        """A block before unmapped space counts with that space, which keeps room to grow for larger requests."""
        while index + 1 < len(pool.free) and _reach(pool.free[index + 1]) < _reach(pool.free[index]):
            index += 1
        return index

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
        return _Block(base, segment, pool, base)

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
        pool.free.remove((block.size, block.start, block))
        return block

    def _growable(self, pool: _Pool, size: int) -> _Block:
        for _, first in pool.unmapped:
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
        insort(pool.unmapped, (base, block))
        return block

    def _map(self, block: _Block, size: int, capacity: int | None) -> _Block | None:
        """Back the beginning of an unmapped block with memory, in whole pages; return the free block it becomes."""
        page, pool = block.pool.page_bytes, block.pool
        size = min(block.size, _round_up(block.start - block.base + size, page) - (block.start - block.base))
        if not self._reserve(size, capacity):
            return None
        pool.unmapped.remove((block.start, block))
        if size < block.size:
            rest = block.cut(size)
            insort(pool.unmapped, (rest.start, rest))
        block.mapped = True
        return self._release(block)

    def _unmap(self, block: _Block) -> None:
        page, pool = block.pool.page_bytes, block.pool
        first = _round_up(block.start - block.base, page) + block.base
        end = (block.start + block.size - block.base) // page * page + block.base
        if end <= first:
            return
        pool.free.remove((block.size, block.start, block))
        if first > block.start:
            rest = block.cut(first - block.start)
            insort(pool.free, (block.size, block.start, block))
            block = rest
        if block.start + block.size > end:
            rest = block.cut(end - block.start)
            insort(pool.free, (rest.size, rest.start, rest))
        self.reserved_bytes -= block.size
        block.mapped = False
        after, before = block.next, block.previous
        if after is not None and not after.mapped:
            pool.unmapped.remove((after.start, after))
            block.absorb(after)
        if before is not None and not before.mapped:
            pool.unmapped.remove((before.start, before))
            before.absorb(block)
            block = before
        insort(pool.unmapped, (block.start, block))

    def _reserve(self, size: int, capacity: int | None) -> bool:
        if capacity is not None and self.reserved_bytes + size > capacity:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _release(self, block: _Block) -> _Block:
        """Join the block with its free neighbours, which leave the list that the result goes to."""
        block.used = False
        free, after, before = block.pool.free, block.next, block.previous
        if after is not None and not after.used and after.mapped:
            del free[bisect_left(free, (after.size, after.start))]
            block.absorb(after)
        if before is not None and not before.used and before.mapped:
            del free[bisect_left(free, (before.size, before.start))]
            before.absorb(block)
            block = before
        insort(free, (block.size, block.start, block))
        return block


def _reach(entry: tuple[int, int, _Block]) -> int:
    after = entry[2].next
    return entry[0] + (after.size if after is not None and not after.mapped else 0)


def replay(
    events: Iterable[MemoryEvent], *, expandable_segments: bool = False, capacity_bytes: int | None = None
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

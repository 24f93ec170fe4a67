"""Memory that several CUDA streams use: when the allocator may give it out again."""

from __future__ import annotations

import torch

from trainwright.estimate.allocator import MIB, CachingAllocator, MemoryEvent, replay
from trainwright.estimate.trace import streams
from trainwright.estimate.trace.answers import Answers
from trainwright.estimate.trace.tracker import Tracker


def test_freed_memory_that_a_stream_still_uses_is_not_given_out_again() -> None:
    """It no longer counts as allocated, as torch.cuda.memory_allocated does not count it."""
    history = [
        MemoryEvent(1, 30 * MIB),
        MemoryEvent(1, -30 * MIB, held=True),
        MemoryEvent(2, 30 * MIB),
        MemoryEvent(2, -30 * MIB),
    ]
    held = replay(history)
    assert (held.peak_allocated_bytes, held.peak_reserved_bytes) == (30 * MIB, 60 * MIB)
    waited = replay([*history[:2], MemoryEvent(1, 0), *history[2:]])
    assert waited.peak_reserved_bytes == 30 * MIB


def test_before_it_gives_up_the_allocator_waits_for_the_streams() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.allocate(1, 30 * MIB)
    allocator.free(1, held=True)
    allocator.allocate(2, 40 * MIB)
    assert (allocator.retries, allocator.out_of_memory, allocator.reserved_bytes) == (1, False, 40 * MIB)
    allocator.let_go(1)  # the wait comes late, and finds nothing to do
    assert allocator.reserved_bytes == 40 * MIB


def tracker() -> Tracker:
    return Tracker("cpu", Answers(mask_is_full=True, learned_share=1.0), capability=None, vocabulary=None)


def let_go(records: Tracker) -> list[int]:
    return [record.key for record in records.records if record.size_bytes == 0]


def test_an_event_stands_for_what_was_given_out_before_it() -> None:
    with tracker() as seen:
        early, late = torch.empty(1000), torch.empty(1000)
        for tensor in (early, late):
            seen.used_on(tensor, stream=7)
        event = streams.InstantEvent()
        del early, tensor
        event.record()
        del late
        event.synchronize()
        freed = [record for record in seen.records if record.size_bytes < 0]
        assert [record.held for record in freed] == [True, True]
        assert let_go(seen) == [freed[0].key]
        streams.wait()
        assert let_go(seen) == [freed[0].key, freed[1].key]


def test_memory_of_one_stream_can_be_taken_again_at_once() -> None:
    with tracker() as seen:
        tensor = torch.empty(1000)
        seen.used_on(tensor, stream=0)
        del tensor
    assert [record.held for record in seen.records] == [False, False]
    assert let_go(seen) == []


def test_reading_a_number_waits_for_the_gpu() -> None:
    """A fake tensor's number is asked of the answers; the process has waited by then."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), tracker() as seen:
        tensor, loss = torch.empty(1000), torch.ones(()).sum()
        seen.used_on(tensor, stream=7)
        del tensor
        assert let_go(seen) == []
        loss.item()
    assert len(let_go(seen)) == 1

"""Which prompts go into one batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainwright.anatomy import anatomy
from trainwright.anatomy.catalog import config_of
from trainwright.estimate.inference import cache_bytes, pass_bytes
from trainwright.evaluate.engines.batching import Room, longest_first, shared_prefix
from trainwright.hardware.reading import GIB

QWEN = anatomy(config_of("Qwen/Qwen2.5-7B-Instruct"))


@given(free=st.integers(0, 64 * GIB), length=st.integers(1, 32768), most=st.integers(1, 256))
def test_a_batch_takes_no_more_than_is_free_and_as_much_as_it_can(free: int, length: int, most: int) -> None:
    """Issue 6: the batch size comes from the memory prediction; one prompt is tried in any case."""
    count = Room(lambda: free, QWEN, "fp16", most).prompts(length)

    def need(samples: int) -> int:
        return cache_bytes(QWEN, "fp16", samples, length) + pass_bytes(QWEN, "fp16", samples, length)

    assert 1 <= count <= most
    assert count == 1 or need(count) <= free
    assert count == most or need(count + 1) > free * 0.8


def test_the_size_is_told_with_its_figures() -> None:
    """Every automatic choice has a reason; where the dimensions are not known it says so."""
    told = Room(lambda: 4 * GIB, QWEN, "fp16", 256).reason(1024)
    assert "MiB a prompt of 1024 tokens (estimate), 4.0 GiB free" in told
    assert "not known" in Room(lambda: 4 * GIB, None, "fp16", 256).reason(1024)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6))
def test_what_sequences_share_is_their_common_beginning_short_of_a_whole_one(sequences: list[list[int]]) -> None:
    """Something is left of each, as the model must go on from a token."""
    shared = shared_prefix(sequences)
    beginnings = {tuple(sequence[:shared]) for sequence in sequences}
    assert len(beginnings) == 1 and all(len(sequence) > shared for sequence in sequences)
    longer = {tuple(sequence[: shared + 1]) for sequence in sequences}
    assert len(longer) > 1 or any(len(sequence) == shared + 1 for sequence in sequences)


@given(st.lists(st.integers(1, 100)))
def test_the_longest_come_first_and_none_is_lost(lengths: list[int]) -> None:
    """A batch that is too large shows at once."""
    order = longest_first(lengths)
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[number] for number in order] == sorted(lengths, reverse=True)

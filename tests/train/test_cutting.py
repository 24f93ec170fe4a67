"""How a global batch is cut: like lengths together, no rank with more to compute, and nothing learned otherwise."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_runs import RunTrain, WriteJob

from trainwright.runs.writing import read_json
from trainwright.train.cutting.dealing import deal, typical
from trainwright.train.cutting.split import Split
from trainwright.train.data.dataset import TokenDataset
from trainwright.train.data.order import epoch_order

LENGTHS = st.lists(st.integers(1, 2048), min_size=1, max_size=120)
RANKS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=6)


def chat_like(samples: int, seed: int = 0) -> np.ndarray:
    """Lognormal lengths, cut off at 2,048 tokens."""
    drawn = np.random.default_rng(seed).lognormal(5.5, 1.1, samples)
    return np.clip(drawn, 8, 2048).astype(np.int64)


def computed(parts: list[np.ndarray], lengths: np.ndarray) -> int:
    """Tokens of a rank's passes, padding included."""
    return sum(len(part) * int(lengths[part].max()) for part in parts if len(part))


@given(LENGTHS, RANKS, st.booleans())
def test_harm_08_each_sample_has_one_place_and_every_rank_finds_the_same(
    drawn: list[int], ranks: list[tuple[int, int]], spread: bool
) -> None:
    """Any lengths, any weights, a last short batch too: nothing is lost, doubled, or more than fits at once."""
    weights, at_once = zip(*ranks, strict=True)
    lengths, samples = np.array(drawn), 1000 + np.arange(len(drawn))
    split = Split(weights, at_once)
    parts = split.parts(samples, lengths, spread=spread)
    assert sorted(np.concatenate([part for own in parts for part in own]).tolist()) == samples.tolist()
    assert [sum(map(len, own)) for own in parts] == split.counts(len(samples))
    assert len({len(own) for own in parts}) == 1
    assert all(len(part) <= most for own, most in zip(parts, at_once, strict=True) for part in own)
    again = Split(weights, at_once).parts(samples.copy(), lengths.copy(), spread=spread)
    assert [[part.tolist() for part in own] for own in again] == [[part.tolist() for part in own] for own in parts]


@given(st.integers(1, 4), st.integers(1, 8), st.booleans(), st.data())
def test_harm_08_sorting_never_adds_padding(ranks: int, micro: int, spread: bool, data: st.DataObject) -> None:
    """Of all ways to fill passes of one size, none has less padding than neighbours by length."""
    count = ranks * micro * data.draw(st.integers(1, 6))
    lengths = np.array(data.draw(st.lists(st.integers(1, 2048), min_size=count, max_size=count)))
    sorted_tokens, in_order = (
        sum(computed(own, lengths) for own in split.parts(np.arange(count), lengths, spread=spread))
        for split in (Split((1,) * ranks, (micro,) * ranks, in_order) for in_order in (False, True))
    )
    assert sorted_tokens <= in_order


def waited_for(parts: list[list[np.ndarray]], lengths: np.ndarray, *, spread: bool) -> int:
    """Tokens of the rank that takes longest, in each pass where ranks wait for each other in each."""
    if not spread:
        return max(computed(own, lengths) for own in parts)
    return sum(max(computed([part], lengths) for part in passes) for passes in zip(*parts, strict=True))


@pytest.mark.parametrize("spread, least, before", [(True, 0.5, 0.3), (False, 0.7, 0.4)])
def test_harm_08_little_is_padding_and_ranks_wait_less(spread: bool, least: float, before: float) -> None:
    """Chat-like lengths in batches of 64 on four ranks, micro-batches of 4: 84 % of what is computed are tokens."""
    shares: dict[bool, list[float]] = {}
    for in_order in (False, True):
        split, real, all_tokens, waited = Split((1,) * 4, (4,) * 4, in_order), 0, 0, 0
        for seed in range(50):
            lengths = chat_like(64, seed)
            parts = split.parts(np.arange(64), lengths, spread=spread)
            real += int(lengths.sum())
            all_tokens += sum(computed(own, lengths) for own in parts)
            waited += 4 * waited_for(parts, lengths, spread=spread)
        shares[in_order] = [real / all_tokens, real / waited]
    assert shares[False][0] > 0.84 and shares[True][0] < 0.55
    assert shares[False][1] > least and shares[True][1] < before


def test_harm_08_ranks_that_wait_for_each_other_have_alike_passes() -> None:
    """In each pass the ranks' longest samples are next to each other in length."""
    lengths, samples = chat_like(64), np.arange(64)
    parts = Split((1,) * 4, (4,) * 4).parts(samples, lengths, spread=True)
    ranges = []
    for passes in zip(*parts, strict=True):
        together = np.concatenate(passes)
        ranges.append((int(lengths[together].min()), int(lengths[together].max())))
    ranges.sort()
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))


def test_harm_08_the_longest_pass_is_first_and_the_next_longest_last() -> None:
    """What is first makes room for all; gradients are exchanged beside the last."""
    lengths, samples = chat_like(64), np.arange(64)
    [own] = Split((1,), (8,)).parts(samples, lengths, spread=False)
    longest = [int(lengths[part].max()) for part in own]
    assert longest[0] == max(longest)
    assert longest[1:] == sorted(longest[1:])


def test_harm_08_a_slower_rank_computes_less_in_tokens_too() -> None:
    """Weights of 40 and 24: shares of the tokens, not only of the samples."""
    shares = []
    for seed in range(50):
        lengths = chat_like(64, seed)
        fast, slow = Split((40, 24), (8, 4)).parts(np.arange(64), lengths, spread=False)
        shares.append(computed(fast, lengths) / (computed(fast, lengths) + computed(slow, lengths)))
    assert np.median(shares) == pytest.approx(40 / 64, abs=0.05)


@given(LENGTHS, st.integers(1, 130))
def test_harm_08_typical_samples_are_neighbours_by_length(drawn: list[int], count: int) -> None:
    lengths = np.array(drawn)
    places = typical(lengths, count)
    assert len(set(places.tolist())) == len(places) == min(count, len(lengths))
    inside = (lengths > lengths[places].min()) & (lengths < lengths[places].max())
    assert set(np.flatnonzero(inside)) <= set(places.tolist())


def test_harm_08_pieces_of_one_number_are_dealt_before_the_next() -> None:
    dealt = deal(np.array([5, 9, 7, 3]), [[1, 1], [1, 1]], (1, 1), together=True)
    assert [[piece.tolist() for piece in own] for own in dealt] == [[[1], [3]], [[2], [0]]]


def test_harm_08_a_run_shows_samples_of_like_length_together(
    tmp_path: Path, write_job: WriteJob, run_train: RunTrain
) -> None:
    """Each step has the samples that the order of the epoch gives it; its passes have neighbours by length."""
    shutil.copy(Path(__file__).with_name("recording_task.py"), tmp_path)
    job = write_job(
        tmp_path,
        task="recording_task:Recording",
        task_options={"pause_s": 0.0},
        train={"global_batch_size": 8, "micro_batch_size": 2, "max_steps": 6, "seed": 3},
    )
    run = run_train(job)
    assert run.exit_code == 0, run.stderr
    shown = run.folder / "shown-1-0.jsonl"
    rows = [json.loads(line) for line in shown.read_text().splitlines()]
    cache = TokenDataset(read_json(run.folder / "prepared.json")["train"]["cache"])
    order = epoch_order(3, 0, len(cache))
    for step in range(6):
        passes = [rows[8 * step + first : 8 * step + first + 2] for first in range(0, 8, 2)]
        asked = [cache[int(index)]["input_ids"].tolist() for index in order[8 * step : 8 * step + 8]]
        assert sorted(row for rows in passes for row in rows) == sorted(asked)
        lengths = sorted(map(len, asked), reverse=True)
        pairs = [lengths[first : first + 2] for first in range(0, 8, 2)]
        assert [[len(row) for row in rows] for rows in passes] == [pairs[0], *pairs[:0:-1]]

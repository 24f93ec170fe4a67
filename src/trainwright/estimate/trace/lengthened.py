"""The records of a deep model from those of two short ones: what a further layer adds, repeated as often as it takes.

Records of the two are laid side by side. Where the longer one has more, a stretch was inserted: the layers between.
Which piece of memory a stretch frees is told by where that piece stands among its like (made by the same operator in
the same pass, of the same size): from the newest or from the oldest, whichever is the same in every layer. So the
records of the deep model are those that its own trace would give, and the allocator's answer to them too.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from trainwright.estimate.trace.tracker import Record, TracePhase

WAYS_TRIED = 8
"""To go on where the two runs differ."""


@dataclass
class Recorded:
    """Records of a run that did not take place, with the parts of its memory, as a `Tracker` has them."""

    records: list[Record]
    parts: dict[int, str]
    operators: int


class _Kind(NamedTuple):
    """What pieces of memory must share to be like each other; `size_bytes` is None where it grows with the layers."""

    size_bytes: int | None
    stream: int
    phase: TracePhase
    operator: str
    part: str | None


class _Move(NamedTuple):
    """One record without a name for its memory; `sign` is that of its size."""

    kind: _Kind
    sign: int
    stream: int
    phase: TracePhase
    operator: str
    held: bool


class _Place(NamedTuple):
    """Where a piece stood among its like when it went."""

    from_newest: int
    from_oldest: int


@dataclass
class _Piles:
    """Pieces that are there, and those that went while they may still be used; by kind, oldest first."""

    live: dict[_Kind, list[int]] = field(default_factory=dict)
    held: dict[_Kind, list[int]] = field(default_factory=dict)

    def of(self, move: _Move) -> list[int]:
        return (self.live if move.sign < 0 else self.held).setdefault(move.kind, [])

    def went(self, move: _Move, key: int) -> None:
        if move.sign < 0 and move.held:
            self.held.setdefault(move.kind, []).append(key)


class _UnlikeError(Exception):
    """The two runs do not differ by whole layers alone."""


class _Step(NamedTuple):
    move: _Move
    size_bytes: int
    place: _Place | None
    """None of what is made."""


def lengthened(
    short: Sequence[Record], longer: Sequence[Record], parts: tuple[dict[int, str], dict[int, str]], times: int
) -> tuple[list[Record], dict[int, str]] | None:
    """Return records and parts of a run that has `times` as many layers more than `short` as `longer` has.

    None where the two do not differ by layers alone.
    """
    short, longer = _with_streams_numbered(short), _with_streams_numbered(longer)
    kinds = _kinds(short, parts[0]), _kinds(longer, parts[1])
    both = set(kinds[0].values()) & set(kinds[1].values())
    first, second = _steps(short, kinds[0], both), _steps(longer, kinds[1], both)
    try:
        return _played(_continued(first, second, times))
    except _UnlikeError:
        return None


def _with_streams_numbered(records: Sequence[Record]) -> list[Record]:
    """Number streams in the order they come in: the numbers of a process go on from run to run."""
    numbers: dict[int, int] = {0: 0}
    return [record._replace(stream=numbers.setdefault(record.stream, len(numbers))) for record in records]


def _kinds(records: Sequence[Record], parts: dict[int, str]) -> dict[int, _Kind]:
    return {
        record.key: _Kind(record.size_bytes, record.stream, record.phase, record.operator, parts.get(record.key))
        for record in records
        if record.size_bytes > 0
    }


def _steps(records: Sequence[Record], kinds: dict[int, _Kind], fixed: Set[_Kind]) -> list[_Step]:
    piles, found = _Piles(), list[_Step]()
    for record in records:
        kind = kinds[record.key]
        if kind not in fixed:
            kind = kind._replace(size_bytes=None)
        sign = (record.size_bytes > 0) - (record.size_bytes < 0)
        move = _Move(kind, sign, record.stream, record.phase, record.operator, record.held)
        place = None
        if sign > 0:
            piles.live.setdefault(kind, []).append(record.key)
        else:
            pile = piles.of(move)
            index = pile.index(record.key)
            place = _Place(len(pile) - 1 - index, index)
            del pile[index]
            piles.went(move, record.key)
        found.append(_Step(move, record.size_bytes, place))
    return found


def _continued(first: Sequence[_Step], second: Sequence[_Step], times: int) -> Iterator[_Step]:
    passes = [[list(steps) for _, steps in groupby(run, key=_pass)] for run in (first, second)]
    if len(passes[0]) != len(passes[1]):
        raise _UnlikeError
    for one, other in zip(*passes, strict=True):
        yield from _aligned(one, other, times)


def _pass(step: _Step) -> Hashable:
    return step.move.phase


def _aligned(one: Sequence[_Step], other: Sequence[_Step], times: int) -> Iterator[_Step]:
    """Yield the steps of one pass, what is inserted in the longer one `times` over."""
    inserted = _insertions(_Moves([step.move for step in one], [step.move for step in other]), 0, 0)
    if inserted is None:
        raise _UnlikeError
    i = j = 0
    for begin, length in (*inserted, (len(one), 0)):
        for step in one[i:begin]:
            more = other[j]
            size = step.size_bytes + times * (more.size_bytes - step.size_bytes)
            yield _Step(step.move, size, _common(step.place, more.place))
            j += 1
        i = begin
        block = [_as_before(other, j + k, length) for k in range(length)]
        for _ in range(times):
            yield from block
        j += length


@dataclass(frozen=True)
class _Moves:
    """Those of one pass of the two runs, and where it is known that they cannot be laid side by side from there on."""

    one: Sequence[_Move]
    other: Sequence[_Move]
    dead_ends: set[tuple[int, int]] = field(default_factory=set)

    def agreeing(self, i: int, j: int) -> int:
        """Return how many moves are the same from here on."""
        one, other, begin = self.one, self.other, i
        while i < len(one) and j < len(other) and one[i] == other[j]:
            i, j = i + 1, j + 1
        return i - begin


def _insertions(moves: _Moves, i: int, j: int) -> list[tuple[int, int]] | None:
    """Return what `other` has more from (i, j) on, as positions in `one` and lengths; None where it has other things.

    Of several ways that is tried first after which the most agrees again.
    """
    same = moves.agreeing(i, j)
    i, j = i + same, j + same
    most = (len(moves.other) - j) - (len(moves.one) - i)
    if i == len(moves.one):
        return [(i, most)] if most else []
    if (i, j) in moves.dead_ends:
        return None
    ahead = ((moves.agreeing(i, j + length), -length) for length in range(1, most + 1))
    for same, length in heapq.nlargest(WAYS_TRIED, ahead):
        if same and (rest := _insertions(moves, i, j - length)) is not None:
            return [(i, -length), *rest]
    moves.dead_ends.add((i, j))
    return None


def _common(one: _Place | None, other: _Place | None) -> _Place | None:
    """Return the place with what differs made void (-1)."""
    if one is None or other is None:
        return None
    newest = one.from_newest if one.from_newest == other.from_newest else -1
    oldest = one.from_oldest if one.from_oldest == other.from_oldest else -1
    if newest < 0 and oldest < 0:
        raise _UnlikeError
    return _Place(newest, oldest)


def _as_before(steps: Sequence[_Step], index: int, length: int) -> _Step:
    """Return a step of an inserted stretch with the place that it shares with the layer beside it."""
    step = steps[index]
    if step.move.kind.size_bytes is None:
        raise _UnlikeError
    if step.place is None:
        return step
    for beside in (index - length, index + length):
        if 0 <= beside < len(steps) and steps[beside].move == step.move:
            return step._replace(place=_common(step.place, steps[beside].place))
    return step


def _played(steps: Iterator[_Step]) -> tuple[list[Record], dict[int, str]]:
    piles, records, parts = _Piles(), list[Record](), dict[int, str]()
    last = 0
    for move, size, place in steps:
        if place is None:
            key = last = last + 1
            piles.live.setdefault(move.kind, []).append(key)
            if move.kind.part is not None:
                parts[key] = move.kind.part
        else:
            pile = piles.of(move)
            index = len(pile) - 1 - place.from_newest if place.from_newest >= 0 else place.from_oldest
            if not 0 <= index < len(pile):
                raise _UnlikeError
            key = pile.pop(index)
            piles.went(move, key)
        records.append(Record(key, size, move.stream, move.phase, move.operator, move.held))
    return records, parts

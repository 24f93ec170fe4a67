"""The course of a micro-step: where memory is highest, and how that grows with samples and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from trainwright.estimate.closed.tape import Size, Tape

Parts = dict[str, Size]
T = TypeVar("T")
TURNING = "loss backward"
EMBEDDING = "embedding backward"
LOGITS = "logits and loss"


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A place in a stretch, in bytes above what was held when the stretch (or the step) began."""

    total: Size
    parts: Parts
    where: str
    idle: Size = 0j
    """Memory that the caching allocator holds besides, because it fits nothing that is asked for."""


@dataclass(frozen=True, slots=True)
class MemoryStretch:
    """A part of the step: its highest points, and what it leaves behind."""

    name: str
    points: tuple[MemoryPoint, ...]
    net: Parts
    at_last: Parts
    """What goes when the last of these layers passes, and not with each."""

    @property
    def net_total(self) -> Size:
        """All that it leaves behind."""
        return sum(self.net.values(), 0j)


def whole_course(tape: Tape, repeats: Mapping[str, int], groups: Mapping[str, int]) -> tuple[MemoryPoint, ...]:
    """Continue a short model's step to the full depth; return the points that can be the step's highest.

    What a layer leaves behind is the same for every layer of its kind, so memory runs along a line while they pass, and
    is highest at one end of it. Layers of several kinds that alternate (one group) pass together.
    """
    base: Parts = {}
    points: list[MemoryPoint] = []
    for group in _grouped(_stretches(tape, repeats), groups):
        counted = [(stretch, repeats.get(stretch.name, 1)) for stretch in group]
        together: Parts = {}
        for stretch, count in counted:
            for part, size in stretch.net.items():
                together[part] = together.get(part, 0j) + count * size
        after = _sum(base, together)
        for stretch, count in counted:
            last = _sum(after, stretch.net, -1)
            starts = (base, last) if count > 1 or len(counted) > 1 else (base,)
            points += [_on(start, point, stretch.name) for start in starts for point in stretch.points]
        for stretch in group:
            after = _sum(after, stretch.at_last)
        base = after
    return _highest_of(points)


def _highest_of(points: Sequence[MemoryPoint]) -> tuple[MemoryPoint, ...]:
    """The points that are the highest in allocated, and those that are in reserved memory."""
    reserved = [replace(point, idle=_idle(point, points)) for point in points]
    return tuple({id(p): p for p in (*hull(reserved), *hull(reserved, lambda p: p.total + p.idle))}.values())


def _idle(point: MemoryPoint, points: Sequence[MemoryPoint]) -> Size:
    """What freed pieces are too small or belong to another stream.

    - Casts of weights are half the size of the gradients that are made as they go.
    - Each stream has memory of its own, and communication has its own streams.
    - Logits in half precision are too small for those in fp32, and what a layer took for a moment is so too; later in
      the backward pass all of it is large enough to be cut up for what is asked. But FSDP2's root reduces at the very
      end, through one piece that is larger than any.
    """
    idle = _beyond(point, points, "weight casts") + _beyond(point, points, "communication")
    if point.where == EMBEDDING:
        return idle + point.idle
    if point.where in ("head", TURNING):
        forward = [p for p in points if p.where.startswith("forward")]
        idle += point.idle + _beyond(point, forward, "temporaries")
    return idle


def _beyond(point: MemoryPoint, points: Sequence[MemoryPoint], part: str) -> Size:
    now = point.parts.get(part, 0j)
    most = max((p.parts.get(part, 0j) for p in points), key=lambda size: size.real + size.imag, default=0j)
    return complex(max(0.0, most.real - now.real), max(0.0, most.imag - now.imag))


def _stretches(tape: Tape, repeats: Mapping[str, int]) -> list[MemoryStretch]:
    """Cut the events of a tape at its marks and find the points of each stretch that can be its highest.

    What all layers of a kind have left behind may go in a stretch that is no layer's: autocast's casts of weights when
    the forward pass ends. The short model has one of these layers, so what goes there counts as often as they are. What
    goes while a layer passes was handed on by its neighbour, one to the next.
    """
    ends = [index for _, index in tape.marks[1:]] + [len(tape.events)]
    turning = next((index for name, index in tape.marks if name == TURNING), 0)
    parts = list(tape.parts)
    for key in _outliving(tape, turning):
        if parts[key] == "temporaries":
            parts[key] = "activations"
    logits = _Segments()
    stands_for: dict[int, int] = {}
    found = []
    position = 0
    for (name, _), end in zip(tape.marks, ends, strict=True):
        count = repeats.get(name, 1)
        own = _layer(name)
        lasting = tape.lasting if own and count > 1 else frozenset()
        events = []
        at_last: Parts = {}
        for key, size in tape.events[position:end]:
            many = stands_for.setdefault(key, count)
            if key in lasting:
                at_last[parts[key]] = at_last.get(parts[key], 0j) + size
            else:
                events.append((size if own or many == 1 else size * many, parts[key]))
        found.append(_stretch(events, name, logits, at_last))
        position = end
    return found


def _layer(name: str) -> str:
    """The layer that a stretch passes, forward or backward; empty for what lies around them."""
    way, _, number = name.partition(" ")
    return number if way in ("forward", "backward") and number.isdigit() else ""


def hull(
    points: Iterable[MemoryPoint], height: Callable[[MemoryPoint], Size] = lambda point: point.total
) -> list[MemoryPoint]:
    """Return the points that are the highest for some number of samples of at least 1."""
    lines = [(height(point), point) for point in points]
    return [point for _, point in _highest(lines)]


def _stretch(events: Sequence[tuple[Size, str]], name: str, logits: _Segments, at_last: Parts) -> MemoryStretch:
    candidates: list[tuple[Size, int]] = []
    idle_at: dict[int, Size] = {}
    total: Size = 0j
    rising = False
    for index, (size, part) in enumerate(events):
        falls = size.real < 0 or size.imag < 0
        if falls and rising:
            candidates.append((total, index))
            idle_at[index] = logits.idle
        if part == LOGITS:
            logits.change(size)
        rising = not falls
        total += size
    if rising:
        candidates.append((total, len(events)))
        idle_at[len(events)] = logits.idle
    wanted = {index for _, index in _highest(candidates)}
    if any(idle_at.values()):
        wanted |= {index for _, index in _highest((line + idle_at[index], index) for line, index in candidates)}
    if name == EMBEDDING and not any(part == "gathered weights" for _, part in events):
        idle_at = dict.fromkeys(idle_at, 0j)
    now: Parts = {}
    points = []
    position = 0
    for index in sorted(wanted):
        _add_up(now, events[position:index])
        position = index
        points.append(MemoryPoint(sum(now.values(), 0j), dict(now), name, idle_at[index]))
    _add_up(now, events[position:])
    return MemoryStretch(name, tuple(points), now, at_last)


def _add_up(now: Parts, events: Iterable[tuple[Size, str]]) -> None:
    for size, part in events:
        now[part] = now.get(part, 0j) + size


class _Segments:
    """The segments that logits get: a piece goes into the smallest free one that holds it, else into a new one."""

    def __init__(self) -> None:
        self._free: list[Size] = []
        self.idle: Size = 0j
        """What is free in all of them."""

    def change(self, size: Size) -> None:
        """Take a piece, or give one back where it is negative."""
        if size.real < 0 or size.imag < 0:
            self._free.append(-size)
            self.idle -= size
            return
        fits = [free for free in self._free if free.real >= size.real and free.imag >= size.imag]
        if fits:
            chosen = min(fits, key=abs)
            self._free.remove(chosen)
            self.idle -= size
            if chosen != size:
                self._free.append(chosen - size)


def _highest(candidates: Iterable[tuple[Size, T]]) -> list[tuple[Size, T]]:
    """Of lines `fixed + samples * each`, those that are the highest for some number of samples of at least 1."""
    best: list[tuple[Size, T]] = []
    for line, what in sorted(candidates, key=lambda c: (-(c[0].real + c[0].imag), -c[0].imag)):
        if best and line.imag <= best[-1][0].imag:
            continue
        while len(best) > 1 and _overtaken(best[-2][0], best[-1][0], line):
            best.pop()
        best.append((line, what))
    return best


def _overtaken(first: Size, middle: Size, last: Size) -> bool:
    """Whether the line `middle` is nowhere above both others; all three in the order of their slopes."""
    return (first.real - last.real) * (middle.imag - first.imag) <= (first.real - middle.real) * (
        last.imag - first.imag
    )


def _outliving(tape: Tape, turning: int) -> set[int]:
    """Keys of what is made in the forward pass and still there in the backward pass."""
    alive: set[int] = set()
    for key, size in tape.events[:turning]:
        if size.real < 0 or size.imag < 0:
            alive.discard(key)
        else:
            alive.add(key)
    return alive


def _grouped(found: Sequence[MemoryStretch], groups: Mapping[str, int]) -> list[list[MemoryStretch]]:
    together: list[list[MemoryStretch]] = []
    for stretch in found:
        group = groups.get(stretch.name)
        if group is not None and together and groups.get(together[-1][0].name) == group:
            together[-1].append(stretch)
        else:
            together.append([stretch])
    return together


def _on(base: Parts, point: MemoryPoint, where: str) -> MemoryPoint:
    parts = _sum(base, point.parts)
    return MemoryPoint(sum(parts.values(), 0j), parts, where, point.idle)


def _sum(a: Parts, b: Parts, factor: int = 1) -> Parts:
    return a | {part: a.get(part, 0j) + factor * size for part, size in b.items()}

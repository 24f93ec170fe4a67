"""Which rank the others wait for, and why it: the cause told apart from those that only wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from trainwright.launch.hangs.evidence import STOPPED, RankEvidence
from trainwright.launch.hangs.flight import Collective
from trainwright.launch.hangs.rank_sections import RankSection

Kind = Literal["hang", "hang/stopped", "hang/silent", "collective-mismatch", "uneven-data", "data-starvation/stuck"]
"""What kind of hang it is, by the names of the doctor's causes."""
PASSED: Final = 2
"""Collectives that a rank may have gone on past the one that does not match: gloo lets a sender go on at once."""


@dataclass(frozen=True)
class Hang:
    """A hang with its cause: the ranks at fault (none where nothing tells), in one line why, and what shows it."""

    kind: Kind
    ranks: tuple[int, ...]
    why: str
    shown: tuple[str, ...]

    @property
    def rank(self) -> int | None:
        """The one rank at fault; None where there are several, or none is known."""
        return self.ranks[0] if len(self.ranks) == 1 else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"schema_version": 1, **asdict(self), "rank": self.rank}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Hang:
        """Return what `to_json` wrote."""
        return cls(data["kind"], tuple(data["ranks"]), data["why"], tuple(data["shown"]))


def find_fault(places: Collection[RankSection], evidence: Mapping[int, RankEvidence]) -> Hang:
    """Return what holds the run up.

    In the order of what proves most: a process that is stopped, calls that do not match, a rank that is gone, one
    whose threads all stand still, one that did not come to the collective of the others, and one that is somewhere
    else than they are (facts_reliability 4; a rank that only waits in a collective is never at fault).
    """
    judged = _Judging({place.rank: place for place in places}, evidence)
    kind, ranks, why = (
        judged.stopped() or judged.unlike_calls() or judged.gone() or judged.silent() or judged.behind()
    ) or judged.elsewhere()
    return Hang(kind, ranks, why, tuple(judged.shown()))


Found = tuple[Kind, tuple[int, ...], str]


class _Judging:
    """The rules, one a method; each returns None where it does not apply."""

    def __init__(self, places: Mapping[int, RankSection], evidence: Mapping[int, RankEvidence]) -> None:
        self._places = places
        self._evidence = {rank: evidence.get(rank, RankEvidence()) for rank in places}
        self._others = "; the others wait for it" if len(places) > 1 else ""

    def stopped(self) -> Found | None:
        ranks = [rank for rank, found in self._evidence.items() if found.process and found.process.state in STOPPED]
        if not ranks:
            return None
        which = ", ".join(f"rank {rank} (pid {self._places[rank].pid})" for rank in ranks)
        are = "is" if len(ranks) == 1 else "are"
        others = "" if len(ranks) == len(self._places) else "; the others wait for it"
        return "hang/stopped", tuple(ranks), f"{which} {are} stopped (state T) by a SIGSTOP{others}"

    def gone(self) -> Found | None:
        ended = tuple(rank for rank, place in self._places.items() if place.ended)
        if not ended:
            return None
        who = f"rank {', '.join(map(str, ended))} has come to its end, and others still wait for it"
        return "uneven-data", ended, who

    def silent(self) -> Found | None:
        silent = [p for p in self._places.values() if p.silent and self._evidence[p.rank].flight is None]
        if not silent or (len(silent) == len(self._places) and len(silent) > 1):
            return None
        place = silent[0]
        process = self._evidence[place.rank].process
        at = f" at {process.stands_at}" if process and process.stands_at else ""
        if process is not None and process.state == "D":
            call = process.waits_in or "unknown call"
            how = f"is in the kernel (state D, {call}){at}: a disk or driver gives no answer"
        else:
            how = f"stands still with all its threads{at}: a call into C holds the interpreter's lock (GIL)"
        why = f"rank {place.rank} (pid {place.pid}) {how}, no sign of life for {place.silent_s:.0f} s{self._others}"
        return "hang/silent", tuple(other.rank for other in silent), why

    def unlike_calls(self) -> Found | None:
        calls = self._first_unlike()
        if calls is None:
            return None
        number = next(iter(calls.values())).number
        said = ", ".join(f"rank {rank} {call}{self._at(rank)}" for rank, call in sorted(calls.items()))
        early = self._left_a_loop(calls)
        if early:
            who = f"rank {', '.join(map(str, early))}"
            return "uneven-data", early, f"{who} was done with a loop before the others: number {number} is {said}"
        counts = Counter(call.call for call in calls.values()).most_common()
        odd = tuple(rank for rank, call in calls.items() if call.call != counts[0][0])
        alone = odd if counts[0][1] > len(calls) / 2 else ()
        return "collective-mismatch", alone, f"ranks called different collectives, number {number}: {said}"

    def behind(self) -> Found | None:
        """A rank that did not come to the collective that others wait in."""
        last = {rank: own.number for rank in self._places if (own := self._last(rank)) is not None}
        front = max(last.values(), default=0)
        behind = [rank for rank, number in last.items() if number < front and not self._waits(rank)]
        if len(last) < 2 or not behind:
            return None
        ahead = max(self._places[rank].step for rank in last if rank not in behind)
        early = [rank for rank in behind if self._places[rank].step > ahead]
        if early:
            numbers = ", ".join(f"rank {rank} came to number {last[rank]}" for rank in sorted(last))
            why = f"rank {', '.join(map(str, early))} went on with fewer collectives than the others: {numbers}"
            return "uneven-data", tuple(early), why
        return self._stands(behind)

    def elsewhere(self) -> Found:
        """The rank that is the least far, of those that do not wait for others."""
        busy = [place for rank, place in self._places.items() if not place.ended and not self._waits(rank)]
        if not busy:
            why = "every rank waits in a collective, and all came to the same: the network or a card does not answer"
            return "hang", (), why
        least = min(place.step for place in busy)
        return self._stands([place.rank for place in busy if place.step == least])

    def shown(self) -> Iterator[str]:
        """Yield what is known of each rank, and of its workers where it waits for data."""
        for rank, place in sorted(self._places.items()):
            found = self._evidence[rank]
            said = [str(place)]
            if found.process is not None and found.process.state is not None:
                said.append(f"pid {found.process.pid} state {found.process.state}")
            last = self._last(rank)
            if last is not None:
                said.append(f"last collective {last.number} ({last})")
            if found.process is not None and found.process.stands_at:
                said.append(f"stands at {found.process.stands_at}")
            yield "; ".join(said)
            if found.feeds_at is not None and place.section == "data":
                yield f"rank {rank}: the thread that makes its batches stands at {found.feeds_at}"
            if place.section == "data":
                yield from (f"rank {rank}, child {child}" for child in found.children)

    def _stands(self, ranks: Sequence[int]) -> Found:
        place = self._places[ranks[0]]
        who = f"rank {', '.join(map(str, ranks))}"
        if place.section == "data":
            return "data-starvation/stuck", tuple(ranks), f"{who} waits for its next batch{self._loader(place.rank)}"
        why = f"{who} stands still in `{place.section}` of step {place.step:,}{self._at(place.rank)}{self._others}"
        return "hang", tuple(ranks), why

    def _loader(self, rank: int) -> str:
        """Say where its batches are made: in a child that tells its line, or in a thread of its own."""
        found = self._evidence[rank]
        worker = next((child for child in found.children if child.stands_at), None)
        if worker is not None:
            return f", not made by its worker pid {worker.pid} ({worker.name}), at {worker.stands_at}"
        at = found.feeds_at or (found.process and found.process.stands_at)
        return f", not made at {at}" if at else ""

    def _at(self, rank: int) -> str:
        process = self._evidence[rank].process
        return f" at {process.stands_at}" if process is not None and process.stands_at else ""

    def _waits(self, rank: int) -> bool:
        return self._places[rank].section == "communication" or self._evidence[rank].in_collective

    def _last(self, rank: int) -> Collective | None:
        flight = self._evidence[rank].flight
        return None if flight is None else flight.last

    def _calls(self) -> dict[int, dict[tuple[str, int], Collective]]:
        flights = {rank: found.flight for rank, found in self._evidence.items() if found.flight is not None}
        return {rank: {(c.group, c.number): c for c in flight.collectives} for rank, flight in flights.items()}

    def _first_unlike(self) -> dict[int, Collective] | None:
        """Return the first calls of one number that differ; but only the last ones, as ranks do not go on past them."""
        calls = self._calls()
        places = sorted({place for own in calls.values() for place in own}, key=lambda place: place[1])
        ends = {group: min(c.number for c in map(self._last, calls) if c) for group, _ in places}
        for group, number in places:
            here = {rank: own[group, number] for rank, own in calls.items() if (group, number) in own}
            if len({call.call for call in here.values()}) > 1 and number >= ends[group] - PASSED:
                return here
        return None

    def _left_a_loop(self, calls: Mapping[int, Collective]) -> tuple[int, ...]:
        """Return the ranks that went on to what the program does next, while others repeat their call once more.

        What comes next was called before, after the loop of an earlier step; a call that no rank ever made there is a
        mistake in the program, and no question of how much data a rank has.
        """
        history = self._calls()
        repeating = [
            rank
            for rank, call in calls.items()
            if (former := history[rank].get((call.group, call.number - 1))) and former.call == call.call
        ]
        others = tuple(rank for rank in calls if rank not in repeating)
        if not repeating or not others:
            return ()
        known = {c.call for rank in others for (_, number), c in history[rank].items() if number < calls[rank].number}
        return others if all(calls[rank].call in known for rank in others) else ()

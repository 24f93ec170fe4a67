"""Who is missing from a collective: from NCCL's words, flight recorders and stacks, rank by rank."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainwright.doctor.finding import Evidence
from trainwright.doctor.lines import first_lines, lines_of, shown
from trainwright.launch.hangs.flight import read_flight_record
from trainwright.launch.hangs.stacks import is_stack_head, main_thread, threads_in

LARGEST_RECORD_BYTES: Final = 64 * 2**20
LEAST_AROUND_A_GAP: Final = 3
_RANK_OF_FILE: Final = re.compile(r"rank[_-]?(\d{1,5})|_(\d{1,5})(?:\.json)?$")
_WAITING: Final = re.compile(
    r"\[Rank (?P<rank>\d+)\] Watchdog caught.*SeqNum=(?P<number>\d+), OpType=(?P<kind>\w+), NumelIn=(?P<size>\d+)"
)
_STATUS: Final = re.compile(
    r"Rank (?P<rank>\d+)\].*[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: "
    r"(?P<completed>-?\d+)"
)


@dataclass
class RankState:
    """How far one rank came: the last collective it took part in, what kind, and where its main thread stands."""

    enqueued: int | None = None
    kind: str | None = None
    evidence: list[Evidence] = field(default_factory=list)
    stands_at: str | None = None


@dataclass(frozen=True)
class Missing:
    """The ranks that were behind, with what shows it; `mismatch` instead where all came, but to different calls."""

    ranks: tuple[int, ...]
    evidence: tuple[Evidence, ...]
    mismatch: bool = False
    stands_at: str | None = None


def is_flight_record(path: Path) -> bool:
    """Say whether a file is a flight recorder's dump in JSON."""
    if path.stat().st_size > LARGEST_RECORD_BYTES:
        return False
    head = "".join(first_lines(path, 3))[:4000]
    return '"entries"' in head and ("collective_seq_id" in head or '"comm_lib_version"' in head)


def is_stack(path: Path) -> bool:
    """Say whether a file is nothing but stacks, as faulthandler writes them."""
    lines = [line for line in first_lines(path, 3) if line.strip()]
    return bool(lines) and is_stack_head(lines[0])


class Collectives:
    """All that is known of who waited for whom; fed file by file."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankState] = {}

    def _of(self, rank: int) -> RankState:
        return self._ranks.setdefault(rank, RankState())

    def add_words(self, place: str, line: str) -> None:
        """Take a line of NCCL's watchdog."""
        if waiting := _WAITING.search(line):
            state = self._of(int(waiting["rank"]))
            number = int(waiting["number"])
            if state.enqueued is None or number > state.enqueued:
                state.enqueued = number
            state.kind = f"{waiting['kind']} of {int(waiting['size']):,} elements"
            state.evidence.append(Evidence(place, f"rank {waiting['rank']} waits in {state.kind}, number {number}"))
        if status := _STATUS.search(line):
            state = self._of(int(status["rank"]))
            state.enqueued = int(status["enqueued"])
            state.evidence.append(
                Evidence(place, f"rank {status['rank']} last entered collective {status['enqueued']}")
            )

    def add_flight_record(self, path: Path, name: str) -> None:
        """Take one rank's flight recorder."""
        record = read_flight_record(path)
        if record is None or record.last is None:
            return
        rank = _rank_in(path.name) if record.rank is None else record.rank
        if rank is None:
            return
        state = self._of(rank)
        state.enqueued = record.last.number
        state.kind = str(record.last)
        state.evidence.append(Evidence(name, f"rank {rank} last entered collective {state.enqueued} ({state.kind})"))

    def add_stack(self, path: Path, name: str) -> None:
        """Take one rank's stacks: where the thread that runs the program stands."""
        rank = _rank_in(path.name)
        if rank is None:
            return
        main = main_thread(threads_in(line.decode("utf-8", "replace") for line in lines_of(path)))
        if main is not None:
            self._of(rank).stands_at = shown(main.stands_at)

    def missing(self) -> Missing | None:
        """Return who was behind the others; None where all are alike, or nothing is known."""
        entered = {rank: state.enqueued for rank, state in sorted(self._ranks.items()) if state.enqueued is not None}
        if len(entered) < 2:
            return None
        evidence = tuple(self._of(rank).evidence[-1] for rank in entered)[:8]
        front = max(entered.values())
        if behind := tuple(rank for rank, number in entered.items() if number < front):
            return Missing(behind, evidence, stands_at=self._where(behind))
        if len({kind for rank in entered if (kind := self._of(rank).kind) is not None}) > 1:
            return Missing(tuple(entered), evidence, mismatch=True)
        if (silent := _only_gap(entered)) is None:
            return None
        gap = Evidence("logs", f"ranks 0 to {max(entered)} but {silent} say that they waited")
        return Missing((silent,), (gap, *evidence), stands_at=self._where((silent,)))

    def _where(self, ranks: Iterable[int]) -> str | None:
        return next((place for rank in ranks if (place := self._of(rank).stands_at) is not None), None)

    def stacks(self) -> Mapping[int, str]:
        """Return where each rank's program stands, for those whose stacks were read."""
        return {rank: state.stands_at for rank, state in self._ranks.items() if state.stands_at is not None}


def _only_gap(ranks: Collection[int]) -> int | None:
    """Return the one rank that is missing below the highest: those who complain waited for it.

    Several are of a node whose log is not here.
    """
    silent = [rank for rank in range(max(ranks)) if rank not in ranks]
    return silent[0] if len(silent) == 1 and len(ranks) >= LEAST_AROUND_A_GAP else None


def _rank_in(name: str) -> int | None:
    match = _RANK_OF_FILE.search(name)
    return int(match[1] or match[2]) if match else None

"""What a flight recorder says: the collectives that a rank took part in, in their order."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SIZED: Final = re.compile(r"all_?reduce|broadcast|all_?gather|reduce_?scatter", re.IGNORECASE)


@dataclass(frozen=True)
class Collective:
    """One collective: its number in its process group, what was called, and on how many elements."""

    group: str
    number: int
    kind: str
    sizes: str

    @property
    def call(self) -> str:
        """What all ranks of the group have to call alike; of a scatter or all-to-all the sizes may differ."""
        return str(self) if _SIZED.search(self.kind) else self.kind

    def __str__(self) -> str:
        return f"{self.kind} {self.sizes}"


@dataclass(frozen=True)
class FlightRecord:
    """The dump of one rank; `rank` is None where the dump does not say whose it is."""

    rank: int | None
    collectives: tuple[Collective, ...]

    @property
    def last(self) -> Collective | None:
        """The collective that was entered last."""
        return max(self.collectives, key=lambda collective: collective.number, default=None)


def read_flight_record(path: Path) -> FlightRecord | None:
    """Return a dump in JSON, of NCCL or gloo; None where it is none."""
    try:
        record = json.loads(path.read_bytes())
        entries = [entry for entry in record["entries"] if not entry.get("is_p2p")]
        found = tuple(
            Collective(
                group=str((entry.get("process_group") or [""])[0]),
                number=int(entry["collective_seq_id"]),
                kind=str(entry.get("profiling_name")),
                sizes=str(entry.get("input_sizes")),
            )
            for entry in entries
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    rank = record.get("rank")
    return FlightRecord(rank if isinstance(rank, int) else None, found)

"""Who was missing, where all that is said is that some ranks waited for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from trainwright.doctor.clues import Clues
from trainwright.doctor.finding import Evidence, Finding
from trainwright.doctor.scan import Sighting

_TIMED_OUT: Final = "collective-timeout"


def whom_they_waited_for(clues: Clues, collateral: Sequence[Sighting]) -> Finding | None:
    """Return what the waiting was for, None where nothing tells; `collateral` is what those who waited said."""
    return next((finding for rule in _RULES if (finding := rule(clues, collateral)) is not None), None)


def _of_cause(collateral: Sequence[Sighting], cause: str) -> list[Sighting]:
    return [sighting for sighting in collateral if sighting.cause.id == cause]


def _preparing(clues: Clues, collateral: Sequence[Sighting]) -> Finding | None:
    """One rank prepared data or model for longer than the others wait, and no step was done."""
    begun, timed_out = next(clues.sightings("preparing"), None), _of_cause(collateral, _TIMED_OUT)
    if begun is None or not timed_out or clues.losses.count:
        return None
    waited = {sighting.rank for sighting in timed_out}
    rank = 0 if 0 not in waited and waited != {None} else begun.rank
    return clues.finding("slow-preparation", [begun.evidence, timed_out[0].evidence], rank=rank)


def _fewer_batches(clues: Clues, collateral: Sequence[Sighting]) -> Finding | None:
    """One rank had fewer batches than the others, where the ranks tell how many they have."""
    batches = {rank: batch for scan in clues.scans for rank, batch in scan.batches.items()}
    if len({total for _, total in batches.values()}) < 2:
        return None
    fewest = min(batches, key=lambda rank: batches[rank][1])
    text = ", ".join(f"rank {rank} batch {done} of {total}" for rank, (done, total) in sorted(batches.items())[:8])
    return clues.finding("uneven-data", [Evidence("logs", text)], {"who": f"rank {fewest}"}, rank=fewest)


def _at_its_data(clues: Clues, collateral: Sequence[Sighting]) -> Finding | None:
    """One rank was out of batches, or stood in its data loader, when the others ran out of patience."""
    if not _of_cause(collateral, _TIMED_OUT):
        return None
    for sighting in clues.sightings():
        rank = sighting.rank
        if sighting.cause.id == "out-of-data":
            who = "a rank" if rank is None else f"rank {rank}"
            return clues.finding("uneven-data", [sighting.evidence], {"who": who}, rank=rank)
        if sighting.cause.id == "waits-for-data":
            return clues.finding("data-loader-stuck", [sighting.evidence], rank=rank)
    return None


def _behind_in_collectives(clues: Clues, collateral: Sequence[Sighting]) -> Finding | None:
    """Some ranks are behind the others in the collectives that they entered, or entered different ones."""
    missing = clues.collectives.missing()
    if missing is None:
        return None
    evidence = list(missing.evidence)
    if missing.mismatch:
        return clues.finding("collective-mismatch", evidence)
    who = "rank " + ", ".join(map(str, missing.ranks))
    if missing.stands_at is not None:
        evidence.append(Evidence("stack", f"{who} stands at {missing.stands_at}"))
    rank = missing.ranks[0] if len(missing.ranks) == 1 else None
    return clues.finding("rank-missing", evidence, {"who": who}, rank=rank)


def _never_connected(clues: Clues, collateral: Sequence[Sighting]) -> Finding | None:
    """The ranks could not connect to each other, and no step was done."""
    apart = _of_cause(collateral, "mesh-failed")
    return clues.finding("network", [apart[0].evidence]) if apart and not clues.losses.count else None


def _aborted(clues: Clues, collateral: Sequence[Sighting]) -> Finding | None:
    """A process aborted, and nobody says anything else."""
    aborted = _of_cause(collateral, "aborted")
    if not aborted or not {sighting.cause.id for sighting in collateral} <= {"aborted", "ranks-ended"}:
        return None
    rank = next((scan.root_rank for scan in clues.scans if scan.root_rank is not None), None)
    return clues.finding("abort", [aborted[0].evidence], rank=rank)


_RULES: Final[tuple[Callable[[Clues, Sequence[Sighting]], Finding | None], ...]] = (
    _preparing,
    _fewer_batches,
    _at_its_data,
    _behind_in_collectives,
    _never_connected,
    _aborted,
)
"""Tried in this order; the first that answers wins."""

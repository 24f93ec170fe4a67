"""How long each rank has been where it is, on the launcher's own clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from trainwright.launch.hangs.rank_sections import START_S, RankSection, limit_s

MOST_BETWEEN_LOOKS_S: Final = 5.0
"""A longer time counts as this: a machine that was suspended, or a launcher that was stopped, proves nothing."""


class Watching:
    """Follows the heartbeats of the ranks; no clock of another machine, and none that can be set, is believed."""

    def __init__(self, ranks: int, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._looked_s = now_s
        self._clock_s = 0.0
        self._places: dict[int, tuple[object, float]] = dict.fromkeys(range(ranks), (None, 0.0))
        self._signs: dict[int, tuple[object, float]] = dict.fromkeys(range(ranks), (None, 0.0))

    def see(self, beats: Mapping[int, Mapping[str, Any]], ended: Collection[int], now_s: float) -> list[RankSection]:
        """Take in the heartbeats as of `now_s`, a monotonic clock; return where the ranks are.

        A rank without one has not begun. `ended` are those whose process is gone.
        """
        self._clock_s += min(now_s - self._looked_s, MOST_BETWEEN_LOOKS_S)
        self._looked_s = now_s
        return [self._place(rank, beats.get(rank), rank in ended) for rank in self._places]

    def _place(self, rank: int, beat: Mapping[str, Any] | None, ended: bool) -> RankSection:
        if beat is None:
            start_s = max(START_S, limit_s({"section": "start"}, self._timeout_s))
            return RankSection(rank=rank, section="start", there_s=self._clock_s, limit_s=start_s, ended=ended)
        where = (beat.get("step"), beat["section"], beat["section_since_s"])
        return RankSection(
            rank=rank,
            section=beat["section"],
            there_s=self._since(self._places, rank, where),
            limit_s=limit_s(beat, self._timeout_s),
            silent_s=self._since(self._signs, rank, beat["time_s"]),
            done=beat.get("step") or 0,
            pid=beat.get("pid"),
            node=beat.get("node"),
            ended=ended,
        )

    def _since(self, known: dict[int, tuple[object, float]], rank: int, value: object) -> float:
        if known[rank][0] != value:
            known[rank] = (value, self._clock_s)
        return self._clock_s - known[rank][1]


def stands_still(places: Collection[RankSection]) -> bool:
    """Say whether no rank gets on: each is overdue, or has ended while others have not.

    One that may still be where it is, in a save say, is what the others wait for: nothing hangs.
    """
    return all(place.overdue for place in places) and not all(place.ended for place in places)

"""The supervisor's part in a hang: it notices, has it looked into and written down, and says what was found."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Final

from trainwright.errors import ExitCode
from trainwright.launch.failures import Failure
from trainwright.launch.hangs.evidence import look
from trainwright.launch.hangs.fault import Hang, find_fault
from trainwright.launch.hangs.rank_sections import RankSection, heartbeats
from trainwright.launch.hangs.watching import Watching, stands_still
from trainwright.launch.run_output import tell
from trainwright.runs.folder import RunFolder
from trainwright.runs.writing import write_json_atomic

LOOK_EVERY_S: Final = 1.0


class Hangs:
    """Looks at the ranks of one attempt once a second; `timeout_s` of 0 never."""

    def __init__(self, folder: RunFolder, attempt: int, ranks: int, timeout_s: float) -> None:
        self._folder, self._attempt, self._ranks, self._timeout_s = folder, attempt, ranks, timeout_s
        self._looked_s = time.monotonic()
        self._watching = Watching(ranks, timeout_s, self._looked_s)

    def found(self, exit_codes: Sequence[int | None]) -> Hang | None:
        """Return the hang of the attempt, once there is one and it was looked into; `exit_codes` are by rank."""
        if not self._timeout_s or time.monotonic() - self._looked_s < LOOK_EVERY_S:
            return None
        ended = {rank for rank, code in enumerate(exit_codes) if code is not None}
        places = self._places(ended)
        if not stands_still(places):
            return None
        try:
            evidence = look(self._folder, self._attempt, places)
            # A rank may have got on while it was asked: then nothing hangs, and it was only slow.
            if not stands_still(self._places(ended)):
                return None
            hang = find_fault(places, evidence)
            write_json_atomic(self._folder.hang_json(self._attempt), hang.to_json())
        except OSError:
            # Nor can the ranks write their signs of life; what is too old to be true ends no run.
            self._watching = Watching(self._ranks, self._timeout_s, time.monotonic())
            return None
        return hang

    def _places(self, ended: Collection[int]) -> list[RankSection]:
        self._looked_s = time.monotonic()
        return self._watching.see(heartbeats(self._folder, self._attempt), ended, self._looked_s)


def say_hang(folder: RunFolder, attempt: int, hang: Hang) -> None:
    """Say what was found, and where more of it is."""
    tell(f"the run stands still: {hang.why}")
    for line in hang.shown:
        tell(f"  {line}")
    tell(f"  stacks and collectives of every rank: {folder.attempt_dir(attempt)}/stack_rank_*.txt, fr_rank_*.json")


def failure_of(hang: Hang) -> Failure:
    """Return a hang as the end of the rank at fault, of the first where none or several are."""
    rank = hang.ranks[0] if hang.ranks else 0
    return Failure(rank, ExitCode.HANG, None, time.time(), hang.why)

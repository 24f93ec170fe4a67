"""The ranks of a run: what they say of themselves, and what the kernel says of their processes."""

from __future__ import annotations

from dataclasses import replace

import psutil

from trainwright.errors import UserError
from trainwright.runs.folder import RunFolder
from trainwright.runs.writing import read_json
from trainwright.watch.samples import RankSample

# psutil's words for the letters of proc(5).
_LETTERS = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_SLEEPING: "S",
    psutil.STATUS_IDLE: "S",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_ZOMBIE: "Z",
}


def read_ranks(folder: RunFolder, attempt: int | None) -> list[RankSample]:
    """Return what every rank of an attempt said last, of whatever node; of any attempt if None."""
    ranks = []
    for path in folder.ranks_dir.glob("rank_*.json"):
        try:
            content = read_json(path)
            rank = RankSample.from_json(content if isinstance(content, dict) else {})
        except (OSError, UserError, ValueError):
            continue  # being written for the first time, or no rank's file at all
        if attempt is None or rank.attempt == attempt:
            ranks.append(rank)
    return sorted(ranks, key=lambda rank: rank.rank)


class RankProcesses:
    """The processes of ranks on this machine, each looked up once."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}

    def add_to(self, rank: RankSample) -> RankSample:
        """Return the rank with the memory and state of its process."""
        if rank.pid is None:
            return rank
        try:
            if rank.pid not in self._processes:
                self._processes[rank.pid] = psutil.Process(rank.pid)
            process = self._processes[rank.pid]
            return replace(rank, resident_bytes=process.memory_info().rss, process_state=_LETTERS.get(process.status()))
        except psutil.NoSuchProcess:
            return replace(rank, process_state="gone")
        except psutil.Error:
            return rank

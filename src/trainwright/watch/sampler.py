"""The one sampler of a node: `python -m trainwright.watch.sampler RUN_DIR ATTEMPT [NODE]`, started with the run.

It writes a sample every few seconds, judges it, and tells alerts on its output; node 0 judges the training too. It
ends with what started it, and nothing that happens to it touches the run.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

from trainwright.job.schema import AlertsSection, Job
from trainwright.runs.folder import RunFolder
from trainwright.runs.kill_domain import die_with_launcher
from trainwright.runs.records import append, read
from trainwright.runs.writing import TEMPORARY_PREFIX, read_json, write_new
from trainwright.watch.alerts.active_alerts import ActiveAlerts, Alert
from trainwright.watch.alerts.conditions import Condition
from trainwright.watch.alerts.delivery import open_delivery
from trainwright.watch.alerts.machine import machine_conditions
from trainwright.watch.alerts.training import (
    LossAndPace,
    RankPace,
    alive_conditions,
    not_finite,
    storage_conditions,
)
from trainwright.watch.gpus import GpuReader
from trainwright.watch.json_lines import Follower
from trainwright.watch.node import NodeReader
from trainwright.watch.ranks import read_ranks
from trainwright.watch.samples import RankSample, Sample

PERIOD_S = 4.0
"""With 8 GPUs, 8 ranks and a busy machine a sample takes about 15 ms: 0.4 % of a core."""
NICENESS = 10
SAMPLE_FILE_LIMIT_BYTES: Final = 16 * 2**20


class SampleFile:
    """system.jsonl of one node: a line a sample, thinned where it is old; this process is its only writer."""

    def __init__(self, path: Path, *, limit_bytes: int = SAMPLE_FILE_LIMIT_BYTES) -> None:
        self._path, self._limit_bytes = path, limit_bytes

    def add(self, sample: Sample) -> None:
        """Append a sample; should the file be too large then, leave out every second one of its older three quarters.

        So the newest quarter is whole and the oldest samples are the thinnest, whatever the length of the run; the
        first one always stays.
        """
        append(self._path, sample.to_json())
        if self._path.stat().st_size > self._limit_bytes:
            self._thin()

    def _thin(self) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        older, newest = lines[: 3 * len(lines) // 4], lines[3 * len(lines) // 4 :]
        temporary = self._path.with_name(f"{TEMPORARY_PREFIX}{self._path.name}")
        temporary.unlink(missing_ok=True)
        write_new(temporary, b"".join([*older[::2], *newest]))
        temporary.replace(self._path)


class RunJudge:
    """What the files of a run say of its training, from the beginning of an attempt."""

    def __init__(self, folder: RunFolder, limits: AlertsSection) -> None:
        self._folder, self._limits = folder, limits
        # An attempt is compared with itself, and its loss also with the run's first.
        self._loss_and_pace, self._rank_pace = LossAndPace(read(folder.metrics_jsonl)), RankPace()
        self._metrics = Follower(folder.metrics_jsonl, from_end=0)
        self._events = Follower(folder.events_jsonl, from_end=0)
        for follower in (self._metrics, self._events):
            list(follower.new())
        self._failed: list[str] = []
        self._began_s = time.time()
        self._newest: tuple[Path, int, float] | None = None

    def conditions(self, sample: Sample, ranks: list[RankSample]) -> Iterator[Condition]:
        """Yield the conditions of the training as of now; `ranks` are those of all nodes."""
        for record in self._metrics.new():
            self._loss_and_pace.add(record)
        for event in self._events.new():
            text = str(event.get("text", ""))
            if event.get("event") == "failed" and "is not finite" in text:
                self._failed.append(text.splitlines()[0].removeprefix("error: "))
        own = {rank.rank: rank for rank in sample.ranks}
        ranks = [own.get(rank.rank, rank) for rank in ranks]
        self._rank_pace.update(ranks)
        yield from self._loss_and_pace.conditions(self._limits)
        yield from self._rank_pace.conditions(self._limits)
        yield from alive_conditions(ranks, sample.time_s)
        yield from (not_finite(text) for text in self._failed)
        size, saved_s = self._checkpoint()
        yield from storage_conditions(sample.host, size, saved_s, sample.time_s, self._limits)

    def _checkpoint(self) -> tuple[int, float]:
        """Return the size of the newest checkpoint in bytes, and when it was written or else the attempt began."""
        checkpoints = self._folder.checkpoints()
        if not checkpoints:
            return 0, self._began_s
        path = checkpoints[0][1]
        if self._newest is None or self._newest[0] != path:
            with suppress(OSError):
                size = sum(file.stat().st_size for file in path.rglob("*"))
                self._newest = (path, size, path.stat().st_mtime)
        return (self._newest[1], max(self._newest[2], self._began_s)) if self._newest else (0, self._began_s)


def main() -> int:
    """Sample and judge until told to stop."""
    die_with_launcher()
    os.umask(0o077)
    os.nice(NICENESS)
    folder, attempt = RunFolder(sys.argv[1]), int(sys.argv[2])
    node = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    stop = _stop_event()
    limits = Job.model_validate(read_json(folder.resolved_json)).alerts
    samples, standing = SampleFile(folder.system_of(node)), ActiveAlerts(socket.gethostname(), attempt)
    earlier = [Alert.from_json(record) for record in read(folder.alerts_of(node))]
    delivery = open_delivery(limits, _say, os.environ, [alert for alert in earlier if alert.severity == "warning"])
    judge, first = RunJudge(folder, limits) if node == 0 else None, None
    with GpuReader() as gpus:
        reader = NodeReader(folder.path, attempt, gpus)
        ended = False
        while not ended:
            ended = stop.wait(PERIOD_S)
            ranks = read_ranks(folder, attempt)
            sample = reader.read(ranks)
            first = first or sample
            conditions = [*machine_conditions(sample, first, limits)]
            conditions += judge.conditions(sample, ranks) if judge is not None else ()
            with suppress(OSError):  # on a disk that is full a sample is lost, and the next may find room
                if not folder.holds_fence(attempt):
                    break
                samples.add(sample)
                for alert in standing.update(sample.time_s, conditions):
                    append(folder.alerts_of(node), alert.to_json())
                    delivery.tell(alert)
    delivery.close()
    return 0


def _stop_event() -> threading.Event:
    """Return what is set by SIGTERM alone: Ctrl+C and a batch system's warning are for the launcher and the ranks."""
    stop = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, ask)
    for number in (signal.SIGINT, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    return stop


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

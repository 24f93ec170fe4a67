"""One attempt after the other, until the run is done, stopped, or fails for a reason that a restart cannot mend."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from trainwright.errors import ExitCode
from trainwright.launch.failures import cause_of, read_failures
from trainwright.launch.processes import STOP_SIGNALS, Processes
from trainwright.launch.resume import Start
from trainwright.launch.showing import RankOutput, tell
from trainwright.plan.layout import Layout
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append
from trainwright.runs.writing import write_json_atomic

HARD_STOP_AFTER = 3
POLL_S = 0.05


@dataclass
class StopAsked:
    """How often the user or the system has asked the launcher to stop."""

    times: int = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count SIGTERM, SIGINT and SIGUSR2 instead of dying of them."""
        former = {number: signal.signal(number, self._count) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.times += 1


def run_attempts(
    folder: RunFolder,
    layout: Layout,
    contract: Mapping[str, Any],
    start: Start,
    choose: Callable[[], Start],
    stop: StopAsked,
    *,
    max_restarts: int,
) -> ExitCode:
    """Run attempts from `start` on until one ends; one that a signal ended goes on from where `choose` says then.

    Restarts are counted since the last newly committed checkpoint, so that a run that gets on is never given up and
    one that does not is not repeated for ever. An exception is not retried: it would come again.
    """
    restarts_without_progress = 0
    while True:
        attempt = open_attempt(folder, contract, start)
        code, killed = _run_attempt(folder, layout, attempt, stop)
        if not killed or stop.times:
            return code
        again = choose()
        restarts_without_progress = 0 if again.step > start.step else restarts_without_progress + 1
        if restarts_without_progress > max_restarts:
            tell(f"error: {max_restarts} restarts brought no new checkpoint; logs are in {folder.latest_logs}")
            return code
        tell(f"Restarting (attempt {attempt + 1}) from step {again.step:,}")
        start = again


def run_prepare(folder: RunFolder, stop: StopAsked) -> ExitCode:
    """Tokenize the data in a process of its own, before any rank exists."""
    folder.logs_dir.mkdir(mode=0o700, exist_ok=True)
    log = folder.logs_dir / "prepare.log"
    log.write_bytes(b"")
    processes = Processes()
    try:
        processes.start("trainwright.train.prepare", [str(folder.path)], {"TOKENIZERS_PARALLELISM": "true"}, log)
        with RankOutput(log) as output:
            while processes.running and not stop.times:
                output.follow()
                time.sleep(POLL_S)
    finally:
        processes.kill()
    if stop.times:
        return ExitCode.STOPPED
    code = processes.exit_codes()[0]
    assert code is not None
    return ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED


def open_attempt(folder: RunFolder, contract: Mapping[str, Any], start: Start) -> int:
    """Return the number of a new attempt, after writing down where its ranks begin; call it holding the run lock."""
    attempt = folder.start_attempt()
    for line in start.lines:
        tell(line)
    resume_from = str(start.path.absolute()) if start.path else None
    write_json_atomic(
        folder.attempt_dir(attempt) / "start.json",
        {"attempt": attempt, "resume_from": resume_from, "step": start.step, "contract": contract},
    )
    return attempt


def _run_attempt(folder: RunFolder, layout: Layout, attempt: int, stop: StopAsked) -> tuple[ExitCode, bool]:
    """Run one attempt; return its exit code and whether a signal from outside ended it."""
    processes = Processes()
    try:
        for rank in range(layout.ranks):
            environment = _environment(layout, rank, attempt)
            processes.start("trainwright.train", [str(folder.path)], environment, folder.rank_log(attempt, rank))
        passed_on = 0
        with RankOutput(folder.rank_log(attempt, 0)) as output:
            while processes.running and not processes.failed and passed_on < HARD_STOP_AFTER:
                if stop.times > passed_on:
                    passed_on = stop.times
                    tell("stopping: every rank saves at the next step boundary")
                    processes.ask_to_stop()
                output.follow()
                time.sleep(POLL_S)
            if processes.failed:
                processes.wait_for_collateral()
    finally:
        processes.kill()
        with suppress(OSError):  # on a disk that fails, what they left half written stays for the next start
            folder.sweep(ended=attempt)
    return _outcome(folder, processes, attempt, stop)


def _outcome(folder: RunFolder, processes: Processes, attempt: int, stop: StopAsked) -> tuple[ExitCode, bool]:
    codes = processes.exit_codes()
    if all(code == 0 for code in codes):
        return ExitCode.DONE, False
    if all(code == ExitCode.STOPPED for code in codes):
        return ExitCode.STOPPED, False
    failures = read_failures(folder.attempt_dir(attempt), codes, processes.killed)
    if not failures:
        assert stop.times >= HARD_STOP_AFTER, codes
        tell("stopped hard: what came after the last checkpoint is lost; run the same command to go on from there")
        return ExitCode.FAILED, False
    cause = cause_of(failures)
    # Rank 0's log was shown as it came, but on a disk that fails it may lack the last words.
    shown = folder.rank_log(attempt, 0).read_text(errors="replace")
    told_already = cause.rank == 0 and cause.text.strip() and cause.text.strip() in shown
    tell("rank 0 failed, as it says above" if told_already else cause.describe())
    with suppress(OSError):  # a disk that fails must not hide the cause
        append(
            folder.events_jsonl,
            {
                "event": "failed",
                "attempt": attempt,
                "rank": cause.rank,
                "exit_code": cause.exit_code,
                "text": cause.text,
            },
        )
    tell(f"log: {folder.rank_log(attempt, cause.rank)}")
    known = cause.exit_code in set(ExitCode)
    return ExitCode(cause.exit_code) if known else ExitCode.FAILED, cause.killed


def _environment(layout: Layout, rank: int, attempt: int) -> dict[str, str]:
    """Return what one rank finds in its environment, besides the launcher's own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // layout.ranks))
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(layout.ranks),
        "LOCAL_WORLD_SIZE": str(layout.ranks),
        "TRAINWRIGHT_ATTEMPT": str(attempt),
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if layout.visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = layout.visible_devices
    else:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu" if layout.device == "cpu" else "mps"}
    return environment

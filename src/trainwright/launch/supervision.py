"""One attempt after the other, until the run is done, stopped, or fails for a reason that a restart cannot mend."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeAlias

from trainwright.errors import ExitCode
from trainwright.hardware.host import kernel_kills
from trainwright.hardware.threads import thread_environment
from trainwright.launch.failures import Failure, cause_of
from trainwright.launch.hangs.ending import Hangs, failure_of, say_hang
from trainwright.launch.hangs.fault import Hang
from trainwright.launch.processes import STOP_SIGNALS, Processes
from trainwright.launch.resume import Start
from trainwright.launch.run_output import RankOutput, outliving_readers, tell
from trainwright.launch.sampling import sampling
from trainwright.out_of_memory import ALLOCATOR_VARIABLES
from trainwright.plan.layout import Layout
from trainwright.runs import index
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append
from trainwright.runs.writing import write_json_atomic

StartRanks: TypeAlias = Callable[[RunFolder, Layout, int], Processes]
"""Starts all ranks of an attempt, whose number it is given."""

HARD_STOP_AFTER = 3
POLL_S = 0.05


@dataclass
class StopAsked:
    """How often the user or the system has asked the launcher to stop, counted up to `most`.

    Only Ctrl+C counts more than once. Others ask several times for one stop: Slurm, a shell whose terminal is closed,
    who wants to be sure.
    """

    times: int = 0
    most: int = HARD_STOP_AFTER
    interrupts: int = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count the signals that ask for a stop, and a reader of the output that has gone, instead of dying of them.

        SIGHUP stays ignored where it is, as under nohup.
        """
        caught = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        former = {number: signal.signal(number, self._count) for number in caught}
        try:
            with outliving_readers(self.ask):
                yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def ask(self) -> None:
        """Ask for a stop, if none was asked for."""
        self.times = max(self.times, 1)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += number == signal.SIGINT
        self.times = min(max(self.times, self.interrupts, 1), self.most)


@dataclass(frozen=True)
class Ready:
    """A run whose ranks can start: how, under which contract, where from, and how to choose that after a restart.

    `hang_timeout_s` is how long a rank may stay in a section of a step; 0 where the ranks tell no sections.
    """

    layout: Layout
    contract: Mapping[str, Any]
    start: Start
    choose: Callable[[], Start]
    hang_timeout_s: float = 0.0


@dataclass(frozen=True)
class End:
    """How an attempt ended; `cause` is None where no rank failed."""

    code: ExitCode
    cause: Failure | None = None


def run_attempts(
    folder: RunFolder,
    ready: Ready,
    stop: StopAsked,
    *,
    with_less_memory: Callable[[Failure, int], Ready],
    max_restarts: int,
    start_ranks: StartRanks,
) -> ExitCode:
    """Run attempts until one ends; one that a signal ended, or that hung, goes on from the newest checkpoint.

    Restarts are counted since the last newly committed checkpoint, so that a run that gets on is never given up and
    one that does not is not repeated for ever. One whose memory ran out goes on as `with_less_memory` says of its cause
    and number; a host's memory has to run out twice, as what filled it may have been another program. Any other
    exception is not retried: it would come again.

    Raises:
        UserError: from `with_less_memory`, when nothing is left to try (exit code 77).
    """
    list_run(folder)
    restarts_without_progress, kernel_killed = 0, False
    start = ready.start
    while True:
        attempt = open_attempt(folder, ready.contract, start)
        end = _run_attempt(folder, ready, attempt, stop, start_ranks)
        cause = end.cause
        if cause is None or stop.times:
            return end.code
        ran_out = cause.out_of_memory_in is not None or (cause.killed_by_kernel and kernel_killed)
        if not ran_out and not cause.killed and end.code is not ExitCode.HANG:
            return end.code
        folder.require_fence(attempt)
        if ran_out:
            ready = with_less_memory(cause, attempt)
        kernel_killed = cause.killed_by_kernel
        again = ready.choose()
        restarts_without_progress = 0 if ran_out or again.step > start.step else restarts_without_progress + 1
        if restarts_without_progress > max_restarts:
            tell(f"error: {max_restarts} restarts brought no new checkpoint; logs are in {folder.latest_logs}")
            return end.code
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
        {
            "attempt": attempt,
            "time_s": time.time(),
            "resume_from": resume_from,
            "step": start.step,
            "contract": contract,
        },
    )
    return attempt


def list_run(folder: RunFolder) -> None:
    """Note the run for `trainwright runs`; short runs that measure something are not noted."""
    not_listed = index.add(folder)
    if not_listed is not None:
        tell(not_listed)


def start_here(folder: RunFolder, layout: Layout, attempt: int) -> Processes:
    """Start every rank as a process of this machine."""
    processes = Processes()
    for rank in range(layout.ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(layout.ranks)}
        environment = place | {"LOCAL_WORLD_SIZE": str(layout.ranks)} | rank_environment(layout, layout.ranks, attempt)
        processes.start("trainwright.train", [str(folder.path)], environment, folder.rank_log(attempt, rank))
    return processes


def _run_attempt(folder: RunFolder, ready: Ready, attempt: int, stop: StopAsked, start_ranks: StartRanks) -> End:
    """Run one attempt to its end."""
    kills_before = kernel_kills()
    processes = start_ranks(folder, ready.layout, attempt)
    hangs, hang = Hangs(folder, attempt, ready.layout.ranks, ready.hang_timeout_s), None
    try:
        passed_on = 0
        with sampling(folder, attempt) as alerts, RankOutput(folder.rank_log(attempt, 0)) as output:
            while processes.running and not processes.failed and passed_on < HARD_STOP_AFTER:
                if stop.times > passed_on:
                    passed_on = stop.times
                    tell("stopping: every rank saves at the next step boundary")
                    processes.ask_to_stop()
                output.follow()
                alerts.follow()
                if (hang := hangs.found(processes.exit_codes())) is not None:
                    break
                time.sleep(POLL_S)
            if processes.failed:
                processes.wait_for_collateral()
    finally:
        processes.kill()
        with suppress(OSError):  # on a disk that fails, what they left half written stays for the next start
            folder.sweep(ended=attempt)
    if hang is not None:
        return _hung(folder, attempt, hang)
    return _outcome(folder, processes, attempt, stop, kernel_kills() - kills_before)


def _hung(folder: RunFolder, attempt: int, hang: Hang) -> End:
    say_hang(folder, attempt, hang)
    _note_failure(folder, attempt, hang.rank, ExitCode.HANG, hang.why, hang=hang.kind)
    return End(ExitCode.HANG, failure_of(hang))


def _outcome(folder: RunFolder, processes: Processes, attempt: int, stop: StopAsked, kills: int) -> End:
    codes = processes.exit_codes()
    if all(code == 0 for code in codes):
        return End(ExitCode.DONE)
    if all(code == ExitCode.STOPPED for code in codes):
        return End(ExitCode.STOPPED)
    failures = processes.failures(folder.attempt_dir(attempt))
    if not failures:
        assert stop.times >= HARD_STOP_AFTER, codes
        tell("stopped hard: what came after the last checkpoint is lost; run the same command to go on from there")
        return End(ExitCode.FAILED)
    cause = cause_of(failures)
    # A SIGKILL alone says nothing of memory; the kernel's own count does.
    cause = replace(cause, killed_by_kernel=cause.signal_name == "SIGKILL" and kills > 0)
    # Rank 0's log was shown as it came, but on a disk that fails it may lack the last words.
    shown = folder.rank_log(attempt, 0).read_text(errors="replace")
    told_already = cause.rank == 0 and cause.text.strip() and cause.text.strip() in shown
    tell("rank 0 failed, as it says above" if told_already else cause.describe())
    _note_failure(folder, attempt, cause.rank, cause.exit_code, cause.text)
    tell(f"log: {folder.rank_log(attempt, cause.rank)}")
    known = cause.exit_code in set(ExitCode)
    return End(ExitCode(cause.exit_code) if known else ExitCode.FAILED, cause)


def _note_failure(
    folder: RunFolder, attempt: int, rank: int | None, exit_code: int | None, text: str, **more: str
) -> None:
    end = {"event": "failed", "time_s": time.time(), "attempt": attempt, "rank": rank, "exit_code": exit_code}
    with suppress(OSError):  # a disk that fails must not hide the cause
        append(folder.events_jsonl, end | {"text": text, **more})


def rank_environment(layout: Layout, ranks_here: int, attempt: int | None) -> dict[str, str]:
    """Return what the ranks of one machine, `ranks_here` of them, find in their environment besides the launcher's.

    `attempt` is None where the first rank is to open one.
    """
    environment = {
        **({} if attempt is None else {"TRAINWRIGHT_ATTEMPT": str(attempt)}),
        **thread_environment(ranks_here),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Which collectives each rank took part in last, kept in memory; asked for when the run stands still.
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "2000"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # The plan counts on them, and ssh hands no environment on.
        **{name: os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)},
    }
    if layout.visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = layout.visible_devices
    else:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu" if layout.device == "cpu" else "mps"}
    return environment

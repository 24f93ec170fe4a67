"""Probes of the built-in trainer: each a fresh process group in a temporary run folder, watched and timed out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.host import kernel_kills, read_host
from trainwright.hardware.reading import GIB, NotAvailable
from trainwright.job.schema import Job
from trainwright.launch.failures import Failure, cause_of
from trainwright.launch.prepare_run import write_run_files
from trainwright.launch.processes import Processes
from trainwright.launch.supervision import POLL_S, StartRanks, StopAsked, run_prepare, start_here
from trainwright.plan.choose import Plan
from trainwright.plan.layout import Layout
from trainwright.plan.search import EVAL_FACTOR
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import read
from trainwright.runs.writing import write_json_atomic
from trainwright.tune.search import ProbeOutcome, Rung

TIMED_STEPS = 3
MOST_PASSES = 16
"""Passes of a timed step at the smallest micro-batch: a larger global batch is timed in part."""
LOOK_AT_HOST_EVERY_S = 0.5


class Probes(Protocol):
    """Runs one probe after the other."""

    def run(self, sizes: Sequence[int], evaluations: Sequence[int]) -> ProbeOutcome:
        """Try micro-batches, one after the other, and then evaluation batches.

        Raises:
            UserError: the job fails for another reason than memory, or the user asked to stop.
        """


@dataclass(frozen=True)
class ProbeWatch:
    """What ends a probe from outside: the user, its time, and the memory of the host."""

    stop: StopAsked
    timeout_s: float
    host_free_bytes: int

    def follow(self, processes: Processes) -> str | None:
        """Wait for the end of all ranks, or end them; return why, None where they ended by themselves."""
        ends_s, look_s = time.monotonic() + self.timeout_s, 0.0
        try:
            while processes.running and not processes.failed:
                if self.stop.times:
                    raise stopped()
                if time.monotonic() > ends_s:
                    return f"it had not ended after {self.timeout_s:g} s"
                if time.monotonic() > look_s:
                    look_s = time.monotonic() + LOOK_AT_HOST_EVERY_S
                    if (left := host_left_bytes()) is not None and left < self.host_free_bytes:
                        return f"{HOST_MEMORY}: {left / GIB:.1f} GiB were left"
                time.sleep(POLL_S)
            if processes.failed:
                processes.wait_for_collateral()
        finally:
            processes.kill()
        return None


HOST_MEMORY = "host memory ran out"


def stopped() -> UserError:
    """Return the end that the user asked for."""
    return UserError("stopped; nothing was kept", exit_code=ExitCode.STOPPED)


def host_left_bytes() -> int | None:
    """Return the host memory that is available, None where that is not known."""
    available = read_host()[0].memory_available_bytes
    return None if isinstance(available, NotAvailable) else available


class WorkerProbes:
    """Probes of a job with the built-in trainer; `folder` is a temporary one, and the job's run is in it."""

    def __init__(
        self, folder: RunFolder, job: Job, plan: Plan, watch: ProbeWatch, *, start_ranks: StartRanks = start_here
    ) -> None:
        self._folder, self._job, self._plan, self._watch = folder, job, plan, watch
        self._start_ranks = start_ranks
        self.longest: int | None = None
        """Tokens of the longest sample, once it was met."""
        folder.create()
        write_run_files(folder, job, plan.to_json())
        code = run_prepare(folder, watch.stop)
        if watch.stop.times:
            raise stopped()
        if code is not ExitCode.DONE:
            raise UserError("the data could not be prepared, as it says above", exit_code=code)

    def run(self, sizes: Sequence[int], evaluations: Sequence[int]) -> ProbeOutcome:
        """Climb the micro-batches in a fresh process group."""
        even = dataclasses.replace(self._plan.layout, rank_samples=(), rank_micro_batch_sizes=())
        layout = even.with_micro_batch(sizes[-1])
        write_run_files(self._folder, self._job, self._plan.to_json() | {"layout": dataclasses.asdict(layout)})
        attempt = self._folder.start_attempt()
        wanted = self._wanted(layout, sizes, evaluations)
        write_json_atomic(
            self._folder.attempt_dir(attempt) / "start.json",
            {"attempt": attempt, "resume_from": None, "step": 0, "contract": {}, "probe": wanted},
        )
        kills_before = kernel_kills()
        processes = self._start_ranks(self._folder, layout, attempt)
        ended_by = self._watch.follow(processes)
        outcome = self._outcome(layout, attempt, wanted["timed_samples"])
        if ended_by is None and (failures := processes.failures(self._folder.attempt_dir(attempt))):
            return self._failed(outcome, cause_of(failures), attempt, sizes, kernel_kills() > kills_before)
        if ended_by is None:
            return outcome
        at = self._under_way(attempt, range(layout.ranks), sizes)
        if ended_by.startswith(HOST_MEMORY):
            return dataclasses.replace(outcome, too_large=at, why=ended_by)
        return dataclasses.replace(outcome, lost_at=at, why=ended_by)

    def _wanted(self, layout: Layout, sizes: Sequence[int], evaluations: Sequence[int]) -> dict[str, Any]:
        left = host_left_bytes() or 0
        return {
            "micro_batch_sizes": list(sizes),
            "evaluation_batch_sizes": list(evaluations),
            "timed_steps": TIMED_STEPS,
            "timed_samples": min(
                layout.global_batch_size, layout.ranks * max(sizes[-1], MOST_PASSES * sizes[0], MOST_PASSES)
            ),
            "host_bytes": max(0, left - self._watch.host_free_bytes) // layout.ranks,
        }

    def _outcome(self, layout: Layout, attempt: int, timed_samples: int) -> ProbeOutcome:
        """Return what all ranks went through: the most memory of any, and the time of the slowest."""
        ranks = range(layout.ranks)
        measured = [self._lines(attempt, rank, "measured") for rank in ranks]
        sizes = set.intersection(*({line["micro_batch_size"] for line in lines} for lines in measured))
        rungs, steps = [], 0
        for size in sorted(sizes):
            rounds = [[line for line in lines if line["micro_batch_size"] == size] for lines in measured]
            self.longest = rounds[0][0]["longest"]
            steps += 1 + sum(line["timed_steps"] for line in rounds[0])
            rungs.append(_rung(size, rounds, passes=-(-timed_samples // (size * layout.ranks))))
        evaluated = [{line["batch_size"] for line in self._lines(attempt, rank, "evaluated")} for rank in ranks]
        return ProbeOutcome(
            rungs=tuple(rungs),
            evaluated=tuple(sorted(set.intersection(*evaluated))),
            steps=steps + (1 if rungs else 0),
        )

    def _failed(
        self, outcome: ProbeOutcome, cause: Failure, attempt: int, sizes: Sequence[int], killed_by_kernel: bool
    ) -> ProbeOutcome:
        at = self._under_way(attempt, [cause.rank], sizes)
        if cause.out_of_memory_in == "training":
            return dataclasses.replace(outcome, too_large=at, why=cause.text)
        if cause.out_of_memory_in == "evaluation":
            tried = max(outcome.evaluated, default=0)
            step = sizes[-1] if self._job.eval.batch_size == "auto" else self._job.eval.batch_size
            return dataclasses.replace(outcome, evaluation_too_large=tried + step, why=cause.text)
        if cause.signal_name == "SIGKILL" and killed_by_kernel:
            return dataclasses.replace(outcome, too_large=at, why=f"{HOST_MEMORY}: the kernel killed rank {cause.rank}")
        if cause.killed:
            return dataclasses.replace(outcome, lost_at=at, why=cause.describe())
        code = ExitCode(cause.exit_code) if cause.exit_code in set(ExitCode) else ExitCode.FAILED
        raise UserError(f"a probe failed: {cause.describe()}", exit_code=code)

    def _under_way(self, attempt: int, ranks: Sequence[int], sizes: Sequence[int]) -> int:
        """Return the micro-batch that the furthest of some ranks had begun."""
        begun = [line["micro_batch_size"] for rank in ranks for line in self._lines(attempt, rank, "began")]
        return max(begun, default=sizes[0])

    def _lines(self, attempt: int, rank: int, what: str) -> list[dict[str, Any]]:
        lines = read(self._folder.attempt_dir(attempt) / f"rank_{rank}.probe.jsonl")
        return [line for line in lines if line["what"] == what]


def _rung(size: int, rounds: Sequence[Sequence[Mapping[str, Any]]], *, passes: int) -> Rung:
    """Return the figures of a micro-batch from the rounds of each rank, of which the shortest counts."""
    of_ranks = [min(lines, key=lambda line: line["step_s"]) for lines in rounds]
    fullest = max(of_ranks, key=lambda line: line["needed_bytes"] / max(1, line["capacity_bytes"]))
    slowest = max(of_ranks, key=lambda line: line["step_s"])
    return Rung(
        micro_batch_size=size,
        needed_bytes=fullest["needed_bytes"],
        capacity_bytes=fullest["capacity_bytes"],
        pass_s=(slowest["step_s"] - slowest["once_s"]) / passes,
        once_s=slowest["once_s"],
        rounds=min(map(len, rounds)),
        spread=max(line["spread"] for lines in rounds for line in lines),
    )


def evaluations_for(job: Job, largest: int, evaluated: int | None, too_large: int | None) -> tuple[int, ...]:
    """Return the evaluation batches that are still to be tried beside a micro-batch."""
    asked = job.eval.batch_size
    sizes = [largest * factor for factor in range(1, EVAL_FACTOR + 1)] if asked == "auto" else [asked]
    return tuple(size for size in sizes if (evaluated or 0) < size < (too_large or size + 1))

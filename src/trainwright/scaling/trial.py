"""One short run of the job, with the workers of `train`, ended as soon as its steps are measured.

The ranks are killed rather than asked to stop: a clean stop would save a checkpoint, which nobody wants.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.host import read_host
from trainwright.launch.failures import Failure, cause_of
from trainwright.launch.hangs.rank_sections import STEP_SECTIONS
from trainwright.launch.prepare_run import make_ready
from trainwright.launch.processes import Processes
from trainwright.launch.run_output import tell
from trainwright.launch.supervision import POLL_S, StopAsked, open_attempt, start_here
from trainwright.out_of_memory import first_words
from trainwright.runs import records
from trainwright.runs.folder import RunFolder
from trainwright.scaling.cases import Case
from trainwright.watch.json_lines import Follower
from trainwright.watch.ranks import read_ranks
from trainwright.watch.samples import RankSample

WARM_UP_STEPS = 5
"""Left out: the first steps load kernels, make room and fill caches; the first one also rehearses an evaluation."""
CORES_FULL = 0.9
"""Share of cores that are busy when they are what programs wait for."""


@dataclass(frozen=True, kw_only=True)
class CoreUse:
    """How many cores the ranks kept `used` of the `allowed` ones, and all programs `busy` of the `machine`'s."""

    allowed: int
    used: float
    machine: int
    busy: float

    @property
    def machine_is_full(self) -> bool:
        """Whether programs wait for a core of the machine."""
        return self.busy >= CORES_FULL * self.machine

    @property
    def is_full(self) -> bool:
        """Whether the ranks wait for a core: of the machine, or of those that they may use."""
        return self.machine_is_full or self.used >= CORES_FULL * self.allowed

    def __str__(self) -> str:
        text = f"the ranks kept {self.used:.1f} of the {self.allowed} cores they may use busy"
        return f"{text}, all programs {self.busy:.1f} of {self.machine}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one short run measured after its warm-up.

    `step_s` and `tokens_per_s` are those of each step, of all ranks together. `sections_s` has the mean seconds of a
    step in each section, by rank; it is empty where ranks did not say.
    """

    step_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    sections_s: tuple[Mapping[str, float], ...] = ()
    cores: CoreUse | None = None


@dataclass(frozen=True)
class Failed:
    """Why a short run measured nothing, in a line."""

    why: str


def try_out(folder: RunFolder, case: Case, stop: StopAsked, *, steps: int, timeout_s: float) -> Trial | Failed:
    """Run `steps` optimizer steps and the warm-up, as an attempt in `folder`; `timeout_s` is for all of it.

    Raises:
        UserError: the data cannot be prepared, or the user asked to stop.
    """
    ready = make_ready(folder, case.job, case.plan.to_json(), stop)
    if isinstance(ready, ExitCode):
        _require_going_on(stop)
        raise UserError("the job's data cannot be prepared, as it says above", exit_code=ready)
    attempt = open_attempt(folder, ready.contract, ready.start)
    window = Window(folder, attempt, ranks=ready.layout.ranks, steps=steps)
    deadline_s = time.monotonic() + timeout_s
    processes = start_here(folder, ready.layout, attempt)
    try:
        while not window.look(processes):
            _require_going_on(stop)
            if not processes.running or processes.failed:
                processes.wait_for_collateral()
                return why_failed(processes.failures(folder.attempt_dir(attempt)))
            if time.monotonic() > deadline_s:
                return Failed(f"timed out: {window.step} of {WARM_UP_STEPS + steps} steps in {timeout_s:g} s")
            time.sleep(POLL_S)
    finally:
        processes.kill()
    return window.trial()


@dataclass
class Window:
    """The steps of an attempt behind its warm-up: seen from outside, while they are done.

    It is full once there are enough of them and every rank has said twice where its time went, a second apart.
    """

    folder: RunFolder
    attempt: int
    ranks: int
    steps: int
    step: int = 0
    _first: dict[int, RankSample] = field(default_factory=dict)
    _last: dict[int, RankSample] = field(default_factory=dict)
    _cores: _CoreTimes | None = None
    _cores_after: _CoreTimes | None = None

    def __post_init__(self) -> None:
        self._metrics = Follower(self.folder.metrics_jsonl)

    def look(self, processes: Processes) -> bool:
        """Take in what the ranks have done since the last call; say whether it is enough."""
        for record in self._metrics.new():
            if _is_step(record, self.attempt):
                self.step = record["step"]
        if self.step < WARM_UP_STEPS:
            return False
        if self._cores is None:
            self._cores = _CoreTimes.of(processes)
        for rank in read_ranks(self.folder, self.attempt):
            if (rank.steps_total or 0) >= WARM_UP_STEPS and rank.sections_s_total is not None:
                self._first.setdefault(rank.rank, rank)
                self._last[rank.rank] = rank
        full = self.step >= WARM_UP_STEPS + self.steps and len(self._spans()) == self.ranks
        if full:
            self._cores_after = _CoreTimes.of(processes)
        return full

    def trial(self) -> Trial:
        """Return what was measured; the ranks are gone by now."""
        measured = [
            record
            for record in records.read(self.folder.metrics_jsonl)
            if _is_step(record, self.attempt) and record["step"] > WARM_UP_STEPS
        ]
        before, after = self._cores, self._cores_after
        assert before is not None and after is not None
        return Trial(
            step_s=tuple(record["step_s"] for record in measured),
            tokens_per_s=tuple(record["tokens_per_s"] for record in measured),
            sections_s=tuple(self._spans()),
            cores=after.since(before),
        )

    def _spans(self) -> list[Mapping[str, float]]:
        """Return the seconds of a step in each section, of every rank of which two moments are known."""
        return [_between(self._first[rank], self._last[rank]) for rank in sorted(self._last) if self._grew(rank)]

    def _grew(self, rank: int) -> bool:
        return (self._last[rank].steps_total or 0) > (self._first[rank].steps_total or 0)


@dataclass(frozen=True)
class _CoreTimes:
    """Seconds that cores were busy up to now, for the ranks and for all programs; of a process that is gone, none."""

    time_s: float
    ranks_s: float
    all_s: float

    @staticmethod
    def of(processes: Processes) -> _CoreTimes:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        counted_twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # proc(5): within user, nice
        return _CoreTimes(
            time_s=time.monotonic(),
            ranks_s=sum(_own_s(child.pid) for child in processes.children),
            all_s=sum(times) - idle - counted_twice,
        )

    def since(self, before: _CoreTimes) -> CoreUse:
        """Return how many cores were busy on average."""
        seconds = self.time_s - before.time_s
        host, _ = read_host()
        machine = psutil.cpu_count() or 1
        return CoreUse(
            allowed=host.cores if isinstance(host.cores, int) else machine,
            used=max(0.0, self.ranks_s - before.ranks_s) / seconds,
            machine=machine,
            busy=max(0.0, self.all_s - before.all_s) / seconds,
        )


def _own_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _between(then: RankSample, now: RankSample) -> dict[str, float]:
    steps = (now.steps_total or 0) - (then.steps_total or 0)
    now_s, then_s = now.sections_s_total or {}, then.sections_s_total or {}
    return {name: (now_s.get(name, 0.0) - then_s.get(name, 0.0)) / steps for name in STEP_SECTIONS}


def _is_step(record: Mapping[str, Any], attempt: int) -> bool:
    return record.get("kind") == "train" and record.get("attempt") == attempt


def _require_going_on(stop: StopAsked) -> None:
    if stop.times:
        raise UserError("stopped: counts are measured together or not at all", exit_code=ExitCode.STOPPED)


def why_failed(failures: Sequence[Failure]) -> Failed:
    """Say on stderr what the ranks said of their end, and return it in a line."""
    if not failures:
        return Failed("the ranks ended before their steps were measured, and left no word")
    cause = cause_of(failures)
    tell(cause.describe())
    if cause.out_of_memory_in is not None:
        said = first_words(cause.text).removeprefix("error: ")
        return Failed(
            said if said.startswith("out of memory") else f"out of memory in {cause.out_of_memory_in}: {said}"
        )
    lines = [line.strip() for line in cause.text.splitlines() if line.strip()]
    if cause.killed or not lines:
        return Failed(cause.describe().splitlines()[0])
    # An error for users says it first, a traceback last.
    return Failed(lines[0].removeprefix("error: ") if lines[0].startswith("error: ") else lines[-1])

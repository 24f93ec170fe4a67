"""Conditions of the training itself: loss, pace, ranks that hold up others, data, disk and checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from trainwright.hardware.reading import GIB
from trainwright.job.schema import AlertsSection
from trainwright.launch.hangs.rank_sections import STEP_SECTIONS
from trainwright.watch.alerts.conditions import Condition, above, below
from trainwright.watch.alerts.loss import LossLevel
from trainwright.watch.samples import HostSample, RankSample

BASELINE_STEPS: Final = 50
WARM_UP_STEPS: Final = 5
RECENT_STEPS: Final = 20
RANK_WINDOW_STEPS: Final = 10
"""A rank's pace is judged over windows of this many steps or more, as samples come, and called slow after two."""
SILENT_S: Final = 30.0
STUCK_S: Final = 300.0
STUCK_STEPS: Final = 10
COMPUTE: Final = ("forward", "backward")
"""Without the sections in which a rank waits for others: those are long on the fast ranks (NVIDIA NVRx, stragglers)."""
MAY_TAKE_LONG: Final = ("start", "eval", "save", "other", "end")


class LossAndPace:
    """The conditions that follow from metrics.jsonl, of which `add` takes each training record."""

    def __init__(self, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin an attempt; `earlier` are the records of those before it."""
        self._loss = LossLevel(earlier)
        self._not_finite_step: int | None = None
        self._steps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._baseline_s: list[float] = []

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one record of a step in; a loss of null is one that was not finite."""
        if record.get("kind") != "train":
            return
        self._loss.add(record)
        step_s = record.get("step_s")
        if "loss" in record and record["loss"] is None:
            self._not_finite_step = record.get("step")
        if isinstance(step_s, int | float):
            self._steps_s.append(step_s)
            if len(self._baseline_s) < WARM_UP_STEPS + BASELINE_STEPS:
                self._baseline_s.append(step_s)

    def conditions(self, limits: AlertsSection) -> Iterator[Condition]:
        """Yield what can be said now."""
        if self._not_finite_step is not None:
            yield not_finite(f"the loss was not finite at step {self._not_finite_step}")
        yield from self._loss.conditions(limits)
        if len(self._baseline_s) == WARM_UP_STEPS + BASELINE_STEPS and len(self._steps_s) == RECENT_STEPS:
            before_s, now_s = median(self._baseline_s[WARM_UP_STEPS:]), median(self._steps_s)
            limit_s = before_s * (1 + limits.step_time_rise_max_pct / 100)
            yield above(
                now_s,
                limit_s,
                margin=(limit_s - before_s) / 2,
                name="step_s",
                rule="step_time",
                subject="step time",
                what=f"steps take {now_s:.3g} s, and took {before_s:.3g} s at first",
                advice="see which section of the ranks has grown, and the clocks of the GPUs",
            )


def not_finite(what: str) -> Condition:
    """Return the condition of a loss or gradient that is NaN or infinite; it never passes by itself."""
    advice = "the last checkpoint is sound: lower train.learning_rate or look for damaged rows, and go on from it"
    return Condition(rule="not_finite", subject="loss", what=what, advice=advice, beyond=True, back=False)


@dataclass
class _Window:
    """A rank's counters when the window began, and its results so far."""

    steps: int
    sections_s: Mapping[str, float]
    scores: deque[float]
    compute_s: float | None = None
    data_pct: float | None = None

    def is_over(self, rank: RankSample) -> bool:
        """Say whether the rank has done the steps of a window since it began."""
        return (rank.steps_total or 0) - self.steps >= RANK_WINDOW_STEPS

    def close(self, rank: RankSample) -> None:
        """Reckon where the time went, and begin the next window."""
        now = rank.sections_s_total or {}
        spent_s = {name: now.get(name, 0.0) - self.sections_s.get(name, 0.0) for name in STEP_SECTIONS}
        steps, all_s = (rank.steps_total or 0) - self.steps, sum(spent_s.values())
        self.compute_s = sum(spent_s[name] for name in COMPUTE) / steps
        self.data_pct = 100 * spent_s["data"] / all_s if all_s > 0 else None
        self.steps, self.sections_s = rank.steps_total or 0, now


class RankPace:
    """Which rank holds up the others, and which waits for data, from the ranks' own counters."""

    def __init__(self) -> None:
        self._windows: dict[int, _Window] = {}

    def update(self, ranks: Sequence[RankSample]) -> None:
        """Take in where the ranks are; a window ends when every rank has done its steps."""
        windows = self._windows_of([r for r in ranks if r.steps_total is not None and r.sections_s_total])
        if not windows or not all(window.is_over(rank) for rank, window in windows):
            return
        for rank, window in windows:
            window.close(rank)
        fastest_s = min(window.compute_s or 0.0 for _, window in windows)
        for _, window in windows:
            if window.compute_s:
                window.scores.append(fastest_s / window.compute_s)

    def _windows_of(self, ranks: Iterable[RankSample]) -> list[tuple[RankSample, _Window]]:
        """Return each rank with its window; a rank that has none yet gets one with its first step."""
        windows = []
        for rank in ranks:
            if rank.rank not in self._windows and rank.steps_total:
                self._windows[rank.rank] = _Window(rank.steps_total, rank.sections_s_total or {}, deque(maxlen=2))
            if rank.rank in self._windows:
                windows.append((rank, self._windows[rank.rank]))
        return windows

    def conditions(self, limits: AlertsSection) -> Iterator[Condition]:
        """Yield what the last windows say."""
        for rank, window in self._windows.items():
            if len(window.scores) == 2:
                score = max(window.scores)
                yield below(
                    score,
                    limits.straggler_min_score,
                    margin=0.1,
                    name="score",
                    rule="straggler",
                    subject=f"rank {rank}",
                    what=f"rank {rank} holds up the others: it computes at {100 * score:.0f} % of the fastest's pace",
                    advice="look at the clocks, temperature and other processes of its GPU, and at its host's load",
                )
            if window.data_pct is not None:
                yield above(
                    window.data_pct,
                    limits.data_wait_max_pct,
                    margin=limits.data_wait_max_pct / 2,
                    name="data_pct",
                    rule="data_wait",
                    subject=f"rank {rank}",
                    what=f"rank {rank} waits for data {window.data_pct:.0f} % of a step",
                    advice="put the data on a faster disk, or give the process more cores",
                )


def alive_conditions(ranks: Sequence[RankSample], now_s: float) -> Iterator[Condition]:
    """Yield whether each rank shows signs of life and gets on."""
    for rank in ranks:
        if rank.section == "end":
            continue
        subject, silent_s = f"rank {rank.rank}", now_s - rank.time_s
        stopped = rank.process_state in ("T", "t")
        state = " (its process is stopped, state T)" if stopped else ""
        yield Condition(
            rule="rank_silent",
            subject=subject,
            what=f"{subject} has given no sign of life for {silent_s:.0f} s{state}",
            advice=f"`kill -CONT {rank.pid}`" if stopped else f"`py-spy dump --pid {rank.pid}` shows where it stands",
            beyond=silent_s > SILENT_S or stopped,
            back=silent_s < SILENT_S / 2 and not stopped,
            figures={"silent_s": round(silent_s, 1), "process_state": rank.process_state},
            threshold={"at_most": SILENT_S},
        )
        if rank.section_since_s is None or rank.section in MAY_TAKE_LONG:
            continue
        steps = rank.steps_total or 0
        spent_s = sum((rank.sections_s_total or {}).get(name, 0.0) for name in STEP_SECTIONS)
        limit_s = max(STUCK_S, STUCK_STEPS * spent_s / steps if steps else STUCK_S)
        in_section_s = now_s - rank.section_since_s
        yield above(
            in_section_s,
            limit_s,
            margin=limit_s / 2,
            name="section_s",
            rule="rank_stuck",
            subject=subject,
            what=f"{subject} has been in `{rank.section}` for {in_section_s:.0f} s",
            advice="a rank in `communication` waits for one that is elsewhere: look at the others",
        )


def storage_conditions(
    host: HostSample, checkpoint_bytes: int, saved_s: float, now_s: float, limits: AlertsSection
) -> Iterator[Condition]:
    """Yield whether the next checkpoint has room, and how much work would be lost now.

    `checkpoint_bytes` is the size of the newest checkpoint, `saved_s` when it was written or the attempt began.
    """
    if host.run_disk_free_bytes is not None:
        free_gib, wanted_gib = host.run_disk_free_bytes / GIB, max(limits.disk_free_min_gib, checkpoint_bytes / GIB)
        yield below(
            free_gib,
            wanted_gib,
            margin=wanted_gib / 10,
            name="free_gib",
            rule="disk",
            subject="run folder",
            what=f"the run folder's disk has {free_gib:.1f} GiB free, and the next checkpoint wants {wanted_gib:.1f}",
            advice="free space, or keep fewer checkpoints (checkpoint.keep)",
        )
    age_min = (now_s - saved_s) / 60
    yield above(
        age_min,
        limits.checkpoint_age_max_min,
        margin=0,
        name="age_min",
        rule="checkpoint_age",
        subject="checkpoint",
        what=f"{age_min:.0f} minutes of work are in no checkpoint",
        advice="save more often: checkpoint.every='200 steps'",
    )

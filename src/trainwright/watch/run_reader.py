"""Reads a run's files into a View, now and again; works on a live run, a finished one, and from another machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from trainwright.hardware.reading import GIB
from trainwright.launch.hangs.rank_sections import STEP_SECTIONS
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import PassedOver
from trainwright.runs.values import document, mapping, mappings, number, text, understood, whole
from trainwright.watch.alerts.active_alerts import Alert, standing_after
from trainwright.watch.json_lines import TAIL_BYTES, Follower, evenly
from trainwright.watch.ranks import read_ranks
from trainwright.watch.run_state import ENDS, state_of
from trainwright.watch.samples import RankSample, Sample
from trainwright.watch.view import Points, RankView, RunState, RunStatus, View

CURVE_POINTS: Final = 240
PACE_S: Final = 300.0
"""The pace is that of the last minutes: long enough for a save or an evaluation to have its share."""


class RunReader:
    """One run, read from its folder alone."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._evaluations = Follower(folder.metrics_jsonl)
        self._eval_losses: list[tuple[float, float]] = []

    def read(self) -> View:
        """Return the run as its files tell it now."""
        folder, now_s = self._folder, time.time()
        system_files = sorted(folder.path.glob("system*.jsonl"))
        lost = PassedOver()
        tails = [list(understood(Sample.from_json, _of_nodes(path), lost)) for path in system_files]
        nodes = tuple(tail[-1] for tail in tails if tail)
        ranks = self._ranks(nodes, tails)
        alert_files = sorted(folder.path.glob("alerts*.jsonl"))
        alerts = [alert for path in alert_files for alert in understood(Alert.from_json, Follower(path).new(), lost)]
        alerts.sort(key=lambda alert: alert.time_s)
        last = _last_step(folder.metrics_jsonl)
        status = self._status(last, ranks, nodes, tails, now_s)
        ended = status.state in ENDS.values()
        return View(
            time_s=now_s,
            run=status,
            nodes=nodes,
            ranks=ranks,
            alerts=() if ended else tuple(standing_after(alerts)),
            alerts_fired=sum(alert.state == "fired" for alert in alerts),
            curves_by_step=self._curves_by_step(last),
            curves_by_time=_curves_by_time(system_files),
            unreadable=lost.count,
        )

    def _ranks(self, nodes: Sequence[Sample], tails: Sequence[Sequence[Sample]]) -> tuple[RankView, ...]:
        """Return the ranks of the newest attempt: as they say themselves, with what the sampler saw of them."""
        attempt = max((rank.attempt or 0 for rank in read_ranks(self._folder, None)), default=None)
        seen = {rank.rank: rank for node in nodes for rank in node.ranks}
        views = []
        for rank in read_ranks(self._folder, attempt):
            sampled = seen.get(rank.rank)
            if sampled is not None and sampled.attempt == rank.attempt:
                rank = replace(rank, resident_bytes=sampled.resident_bytes, process_state=sampled.process_state)
            views.append(_with_shares(rank, tails))
        return tuple(views)

    def _status(
        self,
        last: Mapping[str, Any],
        ranks: Sequence[RankView],
        nodes: Sequence[Sample],
        tails: Sequence[Sequence[Sample]],
        now_s: float,
    ) -> RunStatus:
        folder = self._folder
        first_rank = ranks[0].sample if ranks else None
        state, detail = self._state(ranks, nodes, now_s)
        step, total_steps = whole(last, "step"), first_rank.total_steps if first_rank else None
        checkpoint = folder.checkpoints()
        eval_loss = self._new_evaluations()
        return RunStatus(
            name=folder.path.name,
            folder=str(folder.path),
            state=state,
            detail=detail,
            attempt=first_rank.attempt if first_rank else None,
            step=step,
            total_steps=total_steps or None,
            epoch=number(last, "epoch"),
            loss=number(last, "loss"),
            eval_loss=eval_loss,
            learning_rate=number(last, "learning_rate"),
            grad_norm=number(last, "grad_norm"),
            tokens_per_s=number(last, "tokens_per_s"),
            step_s=number(last, "step_s"),
            left_s=_left_s(tails, step, total_steps) if state == "running" else None,
            checkpoint_step=checkpoint[0][0] if checkpoint else None,
            checkpoint_age_s=_age_s(checkpoint[0][1], now_s) if checkpoint else None,
            layout=_layout(folder),
        )

    def _state(self, ranks: Sequence[RankView], nodes: Sequence[Sample], now_s: float) -> tuple[RunState, str | None]:
        heard_s = max([rank.sample.time_s for rank in ranks] + [node.time_s for node in nodes], default=None)
        newest_attempt = max((node.attempt or 0 for node in nodes), default=0)
        events = Follower(self._folder.events_jsonl).new()
        return state_of(self._folder, events, heard_s=heard_s, newest_attempt=newest_attempt, now_s=now_s)

    def _new_evaluations(self) -> float | None:
        for record in self._evaluations.new(containing=b'"kind":"eval"'):
            step, loss = whole(record, "step"), number(record, "loss")
            if step is not None and loss is not None:
                self._eval_losses = [point for point in self._eval_losses if point[0] < step]
                self._eval_losses.append((step, loss))
        return self._eval_losses[-1][1] if self._eval_losses else None

    def _curves_by_step(self, last: Mapping[str, Any]) -> dict[str, Points]:
        sampled = evenly(self._folder.metrics_jsonl, CURVE_POINTS)
        chosen = [record for record in sampled if record.get("kind") == "train"]
        kept: list[tuple[int, Mapping[str, Any]]] = []
        for record in [*chosen, last]:
            if (step := whole(record, "step")) is None:
                continue
            # A resumed attempt did these steps again: what it found counts.
            while kept and kept[-1][0] >= step:
                kept.pop()
            kept.append((step, record))
        curves = {
            name: tuple((step, value) for step, record in kept if (value := number(record, name)) is not None)
            for name in ("loss", "tokens_per_s")
        }
        return curves | {"eval_loss": tuple(self._eval_losses)}


def _last_step(metrics: Path) -> dict[str, Any]:
    """Return the newest record of a step, nothing if there is none."""
    records = list(Follower(metrics, from_end=TAIL_BYTES).new(containing=b'"kind":"train"'))
    return next((record for record in reversed(records) if whole(record, "step") is not None), {})


def _curves_by_time(system_files: Sequence[Path]) -> dict[str, Points]:
    """Return the mean over GPUs, and the host's available memory, of the first node.

    From the records as they are: to make samples of all these would take longer than reading them.
    """
    records = evenly(system_files[0], CURVE_POINTS) if system_files else []
    timed = [(time_s, record) for record in records if (time_s := number(record, "time_s")) is not None]
    figures: dict[str, Callable[[dict[str, Any]], list[float | None]]] = {
        "gpu_utilization_pct": lambda record: [number(gpu, "utilization_pct") for gpu in mappings(record, "gpus")],
        "gpu_memory_pct": lambda record: [
            _ratio(number(gpu, "memory_used_bytes"), number(gpu, "memory_total_bytes"), 100)
            for gpu in mappings(record, "gpus")
        ],
        "host_available_gib": lambda record: [_ratio(number(mapping(record, "host"), "memory_available_bytes"), GIB)],
    }
    curves = {}
    for name, of in figures.items():
        known = [(time_s, [value for value in of(record) if value is not None]) for time_s, record in timed]
        curves[name] = tuple((time_s, round(fmean(values), 2)) for time_s, values in known if values)
    return curves


def _ratio(value: float | None, whole: float | None, times: float = 1) -> float | None:
    return None if value is None or not whole else times * value / whole


def _of_nodes(path: Path) -> Iterator[dict[str, Any]]:
    return (record for record in Follower(path, from_end=TAIL_BYTES).new() if "host" in record)


def _with_shares(rank: RankSample, tails: Sequence[Sequence[Sample]]) -> RankView:
    """Return the rank with its sections' shares since the oldest sample that is at hand."""
    for tail in tails:
        for sample in tail:
            for then in sample.ranks:
                if then.rank == rank.rank and then.attempt == rank.attempt and then.steps_total:
                    return _shares(rank, then)
    return RankView(sample=rank)


def _shares(rank: RankSample, then: RankSample) -> RankView:
    steps = (rank.steps_total or 0) - (then.steps_total or 0)
    now_s, then_s = rank.sections_s_total or {}, then.sections_s_total or {}
    spent_s = {name: now_s.get(name, 0.0) - then_s.get(name, 0.0) for name in STEP_SECTIONS}
    all_s = sum(spent_s.values())
    if steps <= 0 or all_s <= 0:
        return RankView(sample=rank)
    shares = {name: round(100 * seconds / all_s, 1) for name, seconds in spent_s.items()}
    return RankView(sample=rank, shares_pct=shares, step_s=all_s / steps)


def _left_s(tails: Sequence[Sequence[Sample]], step: int | None, total_steps: int | None) -> float | None:
    """Return the time that the steps left will take at the pace of the last minutes."""
    if step is None or not total_steps or not tails or not tails[0]:
        return None
    tail = tails[0]
    recent = [sample for sample in tail if sample.time_s >= tail[-1].time_s - PACE_S]
    places = [
        (sample.time_s, rank.step)
        for sample in recent
        for rank in sample.ranks[:1]
        if rank.step is not None and sample.attempt == tail[-1].attempt and rank.steps_total
    ]
    if len(places) < 2 or places[-1][1] <= places[0][1]:
        return None
    pace = (places[-1][0] - places[0][0]) / (places[-1][1] - places[0][1])
    return max(0, total_steps - step) * pace


def _age_s(path: Path, now_s: float) -> float | None:
    try:
        return max(0.0, now_s - path.stat().st_mtime)
    except OSError:
        return None  # removed since it was listed


def _layout(folder: RunFolder) -> str | None:
    layout = mapping(document(folder.plan_json, []), "layout")
    ranks, words = whole(layout, "ranks"), [text(layout, name) for name in ("device", "strategy", "precision")]
    if ranks is None or None in words:
        return None
    return f"{ranks} x {words[0]}, {words[1]}, {words[2]}"

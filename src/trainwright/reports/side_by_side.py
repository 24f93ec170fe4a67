"""Several runs in one table: all of them; and those that differ in GPUs, in batch size or in strategy alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from trainwright.reports.run_report import RunReport
from trainwright.runs.values import text, whole
from trainwright.scaling.claims import CLAIMS

Kind = Literal["text", "count", "bytes", "pct", "s", "duration", "rate", "ratio", "loss"]
MEASURED: Final = "measured"
CLAIM: Final = "claim"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column; `kind` is how its values are spelled, `mark` whether they are measured, claims, or neither."""

    name: str
    title: str
    kind: Kind = "text"
    mark: str | None = None


@dataclass(frozen=True, kw_only=True)
class ComparisonTable:
    """A table of runs; a value of None is not available."""

    name: str
    title: str
    note: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data: a row maps the columns' names to values."""
        names = [column.name for column in self.columns]
        return {
            "name": self.name,
            "title": self.title,
            "note": self.note,
            "marks": {column.name: column.mark for column in self.columns if column.mark},
            "rows": [dict(zip(names, row, strict=True)) for row in self.rows],
        }


Cell = tuple[Column, Callable[[RunReport], Any]]


def _measured(name: str, title: str, kind: Kind) -> Cell:
    return Column(name=name, title=title, kind=kind, mark=MEASURED), lambda report: getattr(report.measured, name)


def _summary(name: str, title: str, kind: Kind = "text", mark: str | None = None) -> Cell:
    return Column(name=name, title=title, kind=kind, mark=mark), lambda report: getattr(report.summary, name)


def _layout(name: str, title: str, kind: Kind = "text") -> Cell:
    return Column(name=name, title=title, kind=kind), lambda report: report.layout.get(name)


_RUN: Final = _summary("name", "run")
_MEMORY: Final = (
    _measured("gpu_peak_bytes", "GPU memory, peak", "bytes"),
    _measured("gpu_peak_pct", "in use, peak", "pct"),
)
_PACE: Final = (
    _measured("median_step_s", "step", "s"),
    _measured("tokens_per_s", "tokens/s", "rate"),
    _measured("samples_per_s", "samples/s", "rate"),
)
_TIME: Final = _summary("duration_s", "time", "duration", MEASURED)


def comparisons(reports: Sequence[RunReport]) -> Iterator[ComparisonTable]:
    """Yield the tables; none for a run alone."""
    if len(reports) < 2:
        return
    yield _table(
        "runs",
        "Side by side",
        "Time is that of all attempts together.",
        (
            _RUN,
            _summary("state", "state"),
            _summary("model", "model"),
            _summary("devices", "devices"),
            _layout("strategy", "strategy"),
            _layout("precision", "precision"),
            (Column(name="batch", title="micro x accumulation x ranks"), _batch),
            *_PACE,
            *_MEMORY,
            _measured("gpu_utilization_pct", "utilisation", "pct"),
            _measured("host_peak_bytes", "host memory of a rank", "bytes"),
            _summary("loss", "last loss", "loss", MEASURED),
            _measured("eval_loss", "eval loss", "loss"),
            _TIME,
        ),
        reports,
    )
    for group in _groups(reports, lambda report: (_same(report), _device_model(report), _batch_sizes(report)[0])):
        yield from _by_gpus(group)
    for group in _groups(
        reports, lambda report: (_same(report), report.summary.devices, report.layout.get("strategy"))
    ):
        yield from _by_batch(group)
    for group in _groups(reports, lambda report: (_same(report), report.summary.devices)):
        yield from _by_strategy(group)


def _by_gpus(group: Sequence[RunReport]) -> Iterator[ComparisonTable]:
    """Yield throughput, speed-up and efficiency over the fewest GPUs, beside the guide's claims (S1-28, S1-29)."""
    group = sorted(group, key=lambda report: whole(report.layout, "ranks") or 0)
    counts = [whole(report.layout, "ranks") for report in group]
    if len(set(counts)) < 2 or None in counts:
        return
    unit: Literal["tokens_per_s", "samples_per_s"] = (
        "tokens_per_s" if all(report.measured.tokens_per_s is not None for report in group) else "samples_per_s"
    )
    first = group[0]
    fewest, on_gpus = whole(first.layout, "ranks") or 1, first.layout.get("device") == "cuda"

    def ideal(report: RunReport) -> float:
        return (whole(report.layout, "ranks") or 0) / fewest

    def speed_up(report: RunReport) -> float | None:
        pace, base = getattr(report.measured, unit), getattr(first.measured, unit)
        return pace / base if pace is not None and base else None

    def efficiency(report: RunReport) -> float | None:
        faster = speed_up(report)
        return None if faster is None else 100 * faster / ideal(report)

    def lost(report: RunReport) -> float | None:
        reached_pct = efficiency(report)
        return None if reached_pct is None else 100 - reached_pct

    def claim(report: RunReport) -> str | None:
        count = whole(report.layout, "ranks") or 0
        return str(CLAIMS[count]) if on_gpus and fewest == 1 and count > 1 and count in CLAIMS else None

    devices = "GPUs" if on_gpus else "processes"
    yield _table(
        "gpus",
        f"Number of {devices}",
        f"Micro-batch {_batch_sizes(first)[0]}. "
        f"Speed-up in {unit.partition('_')[0]} a second over the run with the fewest {devices} ({fewest}); "
        "lost is what lacks to the ideal. Claims are the guide's, over one GPU and for its own model.",
        (
            _layout("ranks", devices, "count"),
            _RUN,
            _summary("devices", "devices"),
            _layout("strategy", "strategy"),
            _measured(unit, unit.replace("_per_", "/"), "rate"),
            (Column(name="ideal", title="ideal", kind="ratio"), ideal),
            (Column(name="speed_up", title="speed-up", kind="ratio", mark=MEASURED), speed_up),
            (Column(name="efficiency_pct", title="efficiency", kind="pct", mark=MEASURED), efficiency),
            (Column(name="lost_pct", title="lost", kind="pct", mark=MEASURED), lost),
            (Column(name="claim", title="the guide", mark=CLAIM), claim),
        ),
        group,
    )


def _by_batch(group: Sequence[RunReport]) -> Iterator[ComparisonTable]:
    """Yield memory, use, throughput and time by batch size, beside what a guide claims for the job (S2-24 to S2-28)."""
    group = sorted(group, key=_batch_sizes)
    if len(set(map(_batch_sizes, group))) < 2:
        return

    def epoch_s(report: RunReport) -> float | None:
        steps, step_s = report.measured.steps_per_epoch, report.measured.median_step_s
        return None if steps is None or step_s is None else steps * step_s

    yield _table(
        "batches",
        "Batch sizes",
        "The time of an epoch is that of its steps alone, without evaluations and saves.",
        (
            _layout("micro_batch_size", "micro-batch", "count"),
            _layout("global_batch_size", "global batch", "count"),
            _RUN,
            _measured("steps_per_epoch", "steps an epoch", "count"),
            *_MEMORY,
            _measured("gpu_utilization_pct", "utilisation", "pct"),
            *_PACE,
            (Column(name="epoch_s", title="epoch", kind="duration", mark=MEASURED), epoch_s),
            _TIME,
            (Column(name="claim", title="a guide", mark=CLAIM), _claim_of_job),
        ),
        group,
    )


def _by_strategy(group: Sequence[RunReport]) -> Iterator[ComparisonTable]:
    """Yield memory and pace by strategy."""
    if len({text(report.layout, "strategy") for report in group}) < 2:
        return
    yield _table(
        "strategies",
        "Strategies",
        "On the same devices.",
        (
            _layout("strategy", "strategy"),
            _layout("offload", "in host memory"),
            _RUN,
            (Column(name="batch", title="micro x accumulation x ranks"), _batch),
            *_MEMORY,
            _measured("host_peak_bytes", "host memory of a rank", "bytes"),
            *_PACE,
            _TIME,
        ),
        group,
    )


def _table(name: str, title: str, note: str, cells: Iterable[Cell], reports: Iterable[RunReport]) -> ComparisonTable:
    cells = list(cells)
    return ComparisonTable(
        name=name,
        title=title,
        note=note,
        columns=tuple(column for column, _ in cells),
        rows=tuple(tuple(value(report) for _, value in cells) for report in reports),
    )


def _groups(reports: Sequence[RunReport], key: Callable[[RunReport], Any]) -> Iterator[list[RunReport]]:
    """Yield the runs that have a key in common."""
    groups: dict[str, list[RunReport]] = {}
    for report in reports:
        groups.setdefault(repr(key(report)), []).append(report)
    yield from groups.values()


def _same(report: RunReport) -> list[tuple[str, Any]]:
    """Return what two runs must share for their pace to be compared: the work of a token."""
    alike = ("model.", "method.", "task", "script", "data.max_length", "data.packing")
    return [(key, value) for key, value in report.asked.items() if key.startswith(alike)]


def _device_model(report: RunReport) -> str:
    return re.sub(r"(^|\+ )\d+ x ", r"\1", report.summary.devices or "")


def _batch_sizes(report: RunReport) -> tuple[int, int]:
    return whole(report.layout, "micro_batch_size") or 0, whole(report.layout, "global_batch_size") or 0


def _batch(report: RunReport) -> str | None:
    parts = [whole(report.layout, name) for name in ("micro_batch_size", "gradient_accumulation_steps", "ranks")]
    total = whole(report.layout, "global_batch_size")
    return None if None in (*parts, total) else f"{' x '.join(map(str, parts))} = {total}"


def _claim_of_job(report: RunReport) -> str | None:
    return "; ".join(f"{what}: {figure}" for what, figure in report.claims.items()) or None

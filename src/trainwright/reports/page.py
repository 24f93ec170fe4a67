"""One or several runs as a page that needs nothing but itself: no script, no address, and no text that is not inert."""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup

from trainwright import __version__
from trainwright.hardware.reading import printable
from trainwright.reports.compared import Compared
from trainwright.reports.drawing import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, Tick, draw
from trainwright.reports.formatting import spelled
from trainwright.reports.incidents import Incident
from trainwright.reports.plots import Plot
from trainwright.reports.run_report import RunReport
from trainwright.reports.side_by_side import CLAIM, Column, ComparisonTable, comparisons
from trainwright.watch import formatting

SHORT: Final = (
    "description",
    "script",
    "model.name",
    "model.from_scratch.architecture",
    "task",
    "method.type",
    "data.path",
    "data.max_length",
    "data.packing",
    "train.global_batch_size",
    "train.num_train_epochs",
    "train.max_steps",
    "train.learning_rate",
    "train.lr_scheduler_type",
    "train.optim",
    "train.seed",
    "resources.gpus",
    "resources.strategy",
    "resources.precision",
)
"""The keys of a job that are shown at once; the others unfold."""
MOST_TOGETHER: Final = 10
_FOLDER: Final = Path(__file__).parent
_BAR: Final = 22


@dataclass(frozen=True)
class TimelineBar:
    """A stretch of a rank's time."""

    x: float
    y: int
    width: float
    color: int
    text: str


def render(reports: Sequence[RunReport]) -> str:
    """Return the page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, finalize=_inert
    )
    css = (_FOLDER / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    names = ", ".join(report.summary.name for report in reports)
    return environment.get_template("page.html").render(
        title=f"Report: {names}" if len(reports) < 4 else f"Report: {len(reports)} runs",
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        css=Markup(css),
        made_at=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
        size={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "bottom": BOTTOM},
        comparisons=[_spelled(comparison) for comparison in comparisons(reports)],
        together=[draw(plot, None) for plot in _together(reports)],
        runs=[_run(report) for report in reports],
    )


def _inert(value: Any) -> Any:
    """Return text without what a terminal, a browser or a reader could be misled by; escaping is Jinja's."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _run(report: RunReport) -> dict[str, Any]:
    began_s = report.summary.started_s
    asked = [(key, _value(value)) for key, value in report.asked.items()]
    return {
        "summary": report.summary,
        "cards": list(_cards(report)),
        "finding": report.finding,
        "missing": report.missing,
        "asked_columns": _columns("key", "value"),
        "asked": [(key, _value(report.asked[key])) for key in SHORT if report.asked.get(key) not in (None, "")],
        "all_asked": asked,
        "claim_columns": (Column(name="what", title="what"), Column(name="figure", title="figure", mark=CLAIM)),
        "claims": list(report.claims.items()),
        "decided_columns": _columns("choice", "value", "reason"),
        "decided": [(choice.key, _value(choice.value), choice.reason) for choice in report.decided],
        "notes": report.notes,
        "not_estimated": report.not_estimated,
        "compared_columns": _columns(
            "figure", "rank", "predicted", "expected range", "measured", "measured / predicted", "from"
        ),
        "compared": [_compared(compared) for compared in report.compared],
        "drawings": [draw(plot, began_s) for plot in report.plots],
        "sections": _sections(report.sections_s),
        "incidents": [_incident(incident) for incident in report.incidents],
    }


def _columns(*titles: str) -> tuple[Column, ...]:
    return tuple(Column(name=title, title=title) for title in titles)


def _cards(report: RunReport) -> Iterator[tuple[str, str]]:
    run, measured = report.summary, report.measured
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    yield "step", spelled("count", run.step) + total
    yield "last loss", spelled("loss", run.loss)
    yield "eval loss", spelled("loss", measured.eval_loss)
    yield "step time, median", spelled("s", measured.median_step_s)
    yield "tokens/s", spelled("rate", measured.tokens_per_s)
    yield "GPU memory, peak", spelled("bytes", measured.gpu_peak_bytes)
    yield "GPU memory in use, peak", spelled("pct", measured.gpu_peak_pct)
    yield "GPU utilisation, mean", spelled("pct", measured.gpu_utilization_pct)
    yield "devices", run.devices or formatting.NOT_AVAILABLE
    yield "began", spelled("moment", run.started_s)
    yield "time of all attempts", spelled("duration", run.duration_s)
    yield "attempts", str(run.attempts)


def _value(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _compared(compared: Compared) -> tuple[str, ...]:
    def in_unit(value: float | None) -> str:
        return spelled(compared.unit, value)

    known = compared.predicted is not None
    expected = (
        None
        if compared.low is None or compared.high is None
        else f"{in_unit(compared.low)} to {in_unit(compared.high)}"
    )
    return (
        compared.what,
        "" if compared.rank is None else str(compared.rank),
        f"{in_unit(compared.predicted)}, {compared.kind}" if known else in_unit(None),
        expected or "",
        in_unit(compared.measured) + (", measured" if compared.measured is not None else ""),
        spelled("ratio", compared.ratio),
        compared.source if compared.measured is not None and compared.source else "",
    )


def _sections(sections_s: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Return a bar for each rank and the table of its seconds; ranks all have the same sections."""
    names = [
        name
        for name in dict.fromkeys(name for spent in sections_s.values() for name in spent)
        if any(spent.get(name) for spent in sections_s.values())
    ]
    longest_s = max((sum(spent.values()) for spent in sections_s.values()), default=0.0)
    bars, labels, rows = [], [], []
    for row, (rank, spent) in enumerate(sections_s.items()):
        whole_s = sum(spent.values())
        if not whole_s:
            continue
        x = float(LEFT)
        for color, name in enumerate(names):
            width = (WIDTH - LEFT - RIGHT) * spent.get(name, 0.0) / longest_s
            share = f"{100 * spent.get(name, 0.0) / whole_s:.1f} %"
            in_words = f"rank {rank}, {name}: {spelled('s', spent.get(name))}, {share}"
            bars.append(TimelineBar(round(x, 1), row * _BAR + 2, round(width, 1), color % 10, in_words))
            x += width
        labels.append(Tick(row * _BAR + 15, f"rank {rank}"))
        shares = [f"{spelled('s', spent.get(name))}, {100 * spent.get(name, 0.0) / whole_s:.0f} %" for name in names]
        rows.append((str(rank), *shares))
    return {
        "names": names,
        "bars": bars,
        "labels": labels,
        "rows": rows,
        "height": len(sections_s) * _BAR,
        "columns": _columns("rank", *names),
    }


def _incident(incident: Incident) -> dict[str, Any]:
    return {
        "when": spelled("moment", incident.time_s),
        "step": spelled("count", incident.step),
        "what": incident.what,
        "lines": incident.lines,
        "bad": incident.bad,
    }


def _spelled(comparison: ComparisonTable) -> ComparisonTable:
    rows = [
        tuple(spelled(column.kind, value) for column, value in zip(comparison.columns, row, strict=True))
        for row in comparison.rows
    ]
    return replace(comparison, rows=tuple(rows))


def _together(reports: Sequence[RunReport]) -> Iterator[Plot]:
    """Yield the curves by step that several runs have, a line each."""
    plots = [{plot.name: plot for plot in report.plots} for report in reports[:MOST_TOGETHER]]
    for name in ("loss", "tokens_per_s"):
        of_runs = [(report.summary.name, own[name]) for report, own in zip(reports, plots, strict=False) if name in own]
        if len(of_runs) > 1:
            series = tuple(replace(plot.series[0], name=run) for run, plot in of_runs)
            yield replace(of_runs[0][1], series=series)

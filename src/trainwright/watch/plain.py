"""A View as lines of text: the whole of it once, and then a line now and again, for pipes and logs."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.hardware.reading import GIB, printable
from trainwright.watch import formatting
from trainwright.watch.tables import notes, status_lines, tables
from trainwright.watch.view import Points, View


def whole(view: View, width: int | None = None) -> Iterator[str]:
    """Yield everything, at most `width` wide where that is given; a pipe gets every column."""
    if view.run is None:
        yield "this machine"
    else:
        yield from status_lines(view.run)
        for name, title in (("loss", "loss"), ("eval_loss", "eval loss"), ("tokens_per_s", "tokens/s")):
            points = view.curves_by_step.get(name, ())
            if len(points) > 1:
                yield _course(title, points)
    for table in tables(view):
        yield ""
        yield table.title
        yield from (f"  {line}" for line in table.lines(None if width is None else width - 2))
    if not view.alerts and view.alerts_fired:
        yield ""
        yield f"Alerts: none stands, {view.alerts_fired} fired so far (alerts.jsonl)"
    for note in notes(view):
        yield f"note: {note}"


def _course(title: str, points: Points) -> str:
    (first_step, first), (last_step, last) = points[0], points[-1]
    return f"{title}: {first:.4g} at step {first_step:,.0f}, {last:.4g} at step {last_step:,.0f}"


def brief(view: View) -> str:
    """Return where everything stands in one line."""
    parts = [formatting.clock(view.time_s)]
    if view.run is not None:
        run = view.run
        total = f"/{run.total_steps:,}" if run.total_steps else ""
        parts.append(run.state if run.step is None else f"{run.state} {run.step:,}{total}")
        if run.step is not None:
            parts += [
                f"loss {formatting.number(run.loss, '.4f')}",
                f"{formatting.number(run.tokens_per_s, ',.0f')} tokens/s",
            ]
        if run.left_s is not None:
            parts.append(f"left {formatting.duration(run.left_s)}")
    for node in view.nodes:
        where = f"{node.node}: " if len(view.nodes) > 1 else ""
        for gpu in node.gpus:
            used = formatting.number(gpu.utilization_pct, "d", "%")
            memory = formatting.number(gpu.memory_pct, ".0f", "% memory")
            what = "lost" if gpu.lost else f"{used} {memory} {formatting.number(gpu.temperature_c, 'd', '°C')}"
            parts.append(f"{where}GPU {gpu.index} {what}")
        available = node.host.memory_available_bytes
        parts.append(f"{where}host {formatting.number(available and available / GIB, '.1f', 'GiB free')}")
    if view.alerts:
        parts.append(f"{len(view.alerts)} alerts")
    return printable("  ".join(parts))

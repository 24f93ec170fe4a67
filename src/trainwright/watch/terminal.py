"""The terminal view: the whole View on one screen, anew every two seconds."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Footer, Static

from trainwright.watch import formatting
from trainwright.watch.chart import chart
from trainwright.watch.tables import Table, notes, status_lines, tables
from trainwright.watch.view import Points, Reader, View

PERIOD_S = 2.0
CHART_LINES = 6
_COLOURS = {"warning": "bold red", "note": "yellow"}


class WatchApp(App[None]):
    """Shows what a reader reads until `q`; the wider the terminal, the more columns."""

    TITLE = "trainwright watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #status { height: auto; padding: 0 1; background: $panel; }
    #curves { height: auto; }
    .curve { width: 1fr; height: auto; padding: 0 1; }
    #tables { height: auto; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("c", "curves", "Curves"),
    ]

    def __init__(self, reader: Reader, *, period_s: float = PERIOD_S) -> None:
        super().__init__()
        self._reader, self._period_s = reader, period_s
        self._shown: View | None = None
        self._paused = False
        self._by_time = False

    def compose(self) -> ComposeResult:
        """Lay out status, curves and tables, one below the other."""
        with VerticalScroll():
            yield Static(id="status")
            with Horizontal(id="curves"):
                yield Static(classes="curve", id="left")
                yield Static(classes="curve", id="right")
            yield Static(id="tables")
        yield Footer()

    def on_mount(self) -> None:
        """Read at once, and then every period."""
        self.action_read()
        self.set_interval(self._period_s, self.action_read)

    def on_resize(self) -> None:
        """Lay the same figures out anew."""
        self.call_after_refresh(self._draw)

    def action_read(self) -> None:
        """Read beside the screen's own loop: a shared file system may take its time."""
        if not self._paused:
            self.run_worker(self._read, thread=True, exclusive=True)

    def action_pause(self) -> None:
        """Hold the figures still, or let them go on."""
        self._paused = not self._paused
        self._draw()

    def action_curves(self) -> None:
        """Change between the curves of the training and those of the machine."""
        self._by_time = not self._by_time
        self._draw()

    def _read(self) -> None:
        view = self._reader.read()
        self.call_from_thread(self._show, view)

    def _show(self, view: View) -> None:
        self._shown = view
        self._draw()

    def _draw(self) -> None:
        view = self._shown
        if view is None:
            return
        self.query_one("#status", Static).update(self._status(view))
        for place, (title, points) in zip(("#left", "#right"), self._chosen_curves(view), strict=True):
            widget = self.query_one(place, Static)
            widget.display = len(points) > 1
            lines = [title, *chart(points, widget.size.width - 2, CHART_LINES)]
            widget.update(Text("\n".join(lines), no_wrap=True))
        width = self.size.width - 4
        texts = [_table_text(table, width) for table in tables(view)]
        texts += [Text(f"note: {note}") for note in notes(view)]
        self.query_one("#tables", Static).update(Text("\n\n").join(texts))

    def _status(self, view: View) -> Text:
        lines = status_lines(view.run) if view.run is not None else ["this machine"]
        paused = ", paused" if self._paused else ""
        lines[0] += f"  [{formatting.clock(view.time_s)}{paused}]"
        if view.alerts:
            lines.append(f"alerts standing: {len(view.alerts)}")
        return Text("\n".join(lines))

    def _chosen_curves(self, view: View) -> list[tuple[str, Points]]:
        steps, times = view.curves_by_step, view.curves_by_time
        by_step = [("loss", steps.get("loss", ())), ("tokens/s", steps.get("tokens_per_s", ()))]
        second = "gpu_memory_pct" if times.get("gpu_memory_pct") else "host_available_gib"
        by_time = [
            ("GPU utilisation, %", times.get("gpu_utilization_pct", ())),
            ("GPU memory, %" if second == "gpu_memory_pct" else "host memory available, GiB", times.get(second, ())),
        ]
        return by_time if self._by_time else by_step


def _table_text(table: Table, width: int) -> Text:
    heading, *rows = table.lines(width)
    text = Text(table.title, style="bold")
    text.append(f"\n{heading}", style="dim")
    for row, cells in zip(rows, table.rows, strict=True):
        text.append(f"\n{row}", style=_COLOURS.get(cells[1], "") if table.title == "Alerts" else "not bold")
    return text

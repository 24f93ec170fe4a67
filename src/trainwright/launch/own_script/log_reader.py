"""The log of a script's first rank, read as it grows: its figures go to metrics.jsonl, unless it reports itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import TracebackType

from trainwright.launch.own_script.log_formats import LoggedFigures, ProgressBar, read_bar, read_line
from trainwright.launch.run_output import LONGEST_REST_BYTES
from trainwright.reporting import step_records
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append

_ENDS = re.compile(rb"\r\n|\n|\r")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WITHOUT_A_STEP = (
    "trainwright: figures without a step number are not recorded; call trainwright.report(step=..., loss=...)"
)


class LogMetrics:
    """Follows one rank's log. A dict of the Trainer has no step: it gets that of the bar drawn right after it."""

    def __init__(self, folder: RunFolder, attempt: int) -> None:
        self._log = folder.rank_log(attempt, 0).open("rb")
        self._metrics, self._attempt = folder.metrics_jsonl, attempt
        self._reported = folder.attempt_dir(attempt) / "reported.json"
        self._rest = b""
        self._steps = BarSteps()
        self._waiting: LoggedFigures | None = None
        self._has_figures = False
        self._warned: set[str] = set()

    def follow(self) -> None:
        """Record what has come since the last call."""
        *pieces, self._rest = _ENDS.split(self._rest + self._log.read())
        self._rest = self._rest[-LONGEST_REST_BYTES:]
        for piece in pieces:
            self._take(_ESCAPES.sub("", piece.decode("utf-8", "replace")))

    def __enter__(self) -> LogMetrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record what is left, at the end of the script."""
        self.follow()
        self._take(_ESCAPES.sub("", self._rest.decode("utf-8", "replace")))
        self._place_waiting(self._steps.step)
        self._log.close()

    def _take(self, text: str) -> None:
        bar = read_bar(text)
        if bar is not None:
            self._take_bar(bar)
            return
        figures = read_line(text)
        if figures is None:
            return
        self._has_figures = True
        if figures.step is not None:
            self._record(figures.step, figures.values, figures.source)
        else:
            self._place_waiting(self._steps.step)
            self._waiting = figures

    def _take_bar(self, bar: ProgressBar) -> None:
        step = self._steps.step_of(bar)
        if step is None:
            return
        pace = {} if bar.step_s is None else {"step_s": bar.step_s}
        if self._waiting is not None:
            self._waiting = LoggedFigures(None, None, {**self._waiting.values, **pace}, self._waiting.source)
            self._place_waiting(step)
        elif self._steps.has_moved and (pace or bar.figures) and not self._has_figures:
            self._record(step, {**bar.figures, **pace}, "tqdm bar")

    def _place_waiting(self, step: int | None) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        if step is None:
            self._warn(WITHOUT_A_STEP)
        else:
            self._record(step, waiting.values, waiting.source)

    def _record(self, step: int, values: Mapping[str, float], source: str) -> None:
        if self._reported.exists():
            return
        try:
            for record in step_records(step, values):
                append(self._metrics, {"attempt": self._attempt, "source": source, **record})
        except OSError as error:
            self._warn(f"trainwright: metrics cannot be recorded: {error}")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            print(text, file=sys.stderr, flush=True)


class BarSteps:
    """The optimizer step that bars show: one bar for the whole run, or one for each epoch."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.has_moved = False
        self._total = self._done = self._before = 0

    def step_of(self, bar: ProgressBar) -> int | None:
        """Return the step of a bar, None where it is another than that of training, such as an evaluation's."""
        again = "epoch" in bar.description.lower() and bar.done < self._done and self._done == self._total
        if again:
            self._before += self._total
        elif self.step is not None and (bar.total != self._total or bar.done < self._done):
            return None
        step = self._before + bar.done
        self.has_moved = step != (self.step or 0)
        self._total, self._done, self.step = bar.total, bar.done, step
        return step

"""What the user sees of a run: rank 0's lines as they come, with a progress bar on a terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

STEP_LINE = re.compile(r"^step ([\d,]+)/([\d,]+)  .*(loss \S+)  .*?(\S+ s/step)  .*(left .*)$")
LONGEST_REST_BYTES = 2**20
"""Output without a line end that is kept, such as a bar that is drawn all day; the beginning of more is dropped."""
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class RankOutput:
    """Follows a log file and passes its whole lines on to stderr; control characters are left out."""

    def __init__(self, log: Path) -> None:
        self._file: BinaryIO = log.open("rb")
        self._rest = b""
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            # Three figures, so that bar and count keep their place on 80 columns; the log has the whole line.
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(16), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar = self._progress.add_task("", total=None, visible=False)

    def __enter__(self) -> RankOutput:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.follow()
        if self._progress is not None:
            self._progress.stop()
        self._file.close()

    def follow(self) -> None:
        """Show what has come since the last call."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            # A bar is drawn over itself, up to the line's end: only its last state is of use.
            drawn = line.removesuffix(b"\r").rpartition(b"\r")[2]
            self._show(UNPRINTABLE.sub("", drawn.decode("utf-8", "replace")))
        self._rest = self._rest[-LONGEST_REST_BYTES:]

    def _show(self, line: str) -> None:
        step = STEP_LINE.match(line)
        if self._progress is None:
            print(line, file=sys.stderr, flush=True)
        elif step is None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            done, total = (int(number.replace(",", "")) for number in step.groups()[:2])
            self._progress.update(
                self._bar, completed=done, total=total, description="  ".join(step.groups()[2:]), visible=True
            )


def tell(line: str) -> None:
    """Print one line of the launcher's own on stderr."""
    print(UNPRINTABLE.sub("", line), file=sys.stderr, flush=True)

"""What the user sees of a run: rank 0's lines as they come, with a progress bar on a terminal."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

STEP_LINE = re.compile(r"^step ([\d,]+)/([\d,]+)  .*(loss \S+)  .*?(\S+ s/step)  .*(left .*)$")
LONGEST_REST_BYTES = 2**20
"""Output without a line end that is kept, such as a bar that is drawn all day; the beginning of more is dropped."""
_READER_GONE = (errno.EPIPE, errno.EIO)
"""Of a pipe, and of a terminal."""
_lost: list[int] = []
"""Why readers of this process's output were found to have gone."""
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
    """Print one line of the launcher's own on stderr; where nobody reads it any more, it is lost."""
    Outliving(sys.stderr, lambda: None).write(f"{UNPRINTABLE.sub('', line)}\n")


class Outliving:
    """A text stream that goes on where its reader has gone, and tells so: `| head`, a terminal that is closed."""

    def __init__(self, stream: TextIO, gone: Callable[[], None]) -> None:
        self._stream, self._gone = stream, gone

    def write(self, text: str) -> int:
        """Write at once what can be written."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Do nothing, as `write` has done it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        """Have what follows go nowhere; on a full disk only this is lost, as room may come."""
        if error.errno not in _READER_GONE:
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        _lost.append(error.errno)
        self._gone()


@contextmanager
def outliving_readers(gone: Callable[[], None]) -> Iterator[None]:
    """Let stdout and stderr outlive their readers; `gone` is called when one has left, or had before."""
    if _lost:
        gone()
    stdout, stderr = Outliving(sys.stdout, gone), Outliving(sys.stderr, gone)
    with redirect_stdout(stdout), redirect_stderr(stderr):  # type: ignore[type-var]  # as much of a stream as is used
        yield

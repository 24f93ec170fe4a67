"""Stacks as faulthandler writes them, and where the program stands in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HEAD: Final = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\)")
_FRAME: Final = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|<frozen|<string>|/trainwright/(?:train|runs)/")
_COLLECTIVE: Final = re.compile(r"/torch/distributed/")
_INNERMOST: Final = 8
"""Frames looked at for a collective: the model itself may run inside of torch.distributed's wrappers."""


@dataclass(frozen=True)
class StackFrame:
    """One call."""

    file: str
    line: int
    function: str

    @property
    def own(self) -> bool:
        """Whether it is of the user's program, and neither of a library nor of this one."""
        return _LIBRARY.search(self.file) is None

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Thread:
    """The calls of one thread, the innermost first."""

    frames: tuple[StackFrame, ...]

    @property
    def is_main(self) -> bool:
        """Whether it runs the program itself."""
        return any(frame.function == "<module>" for frame in self.frames)

    @property
    def in_collective(self) -> bool:
        """Whether it waits for other ranks."""
        return any(_COLLECTIVE.search(frame.file) for frame in self.frames[:_INNERMOST])

    @property
    def stands_at(self) -> str:
        """The innermost call of the user's own program, if there is one, and where that is at the moment."""
        inner = self.frames[0]
        own = next((frame for frame in self.frames if frame.own), None)
        return str(inner) if own is None or own == inner else f"{own} (in {inner})"


def is_stack_head(line: str) -> bool:
    """Say whether a line begins the stack of a thread."""
    return _HEAD.match(line) is not None


def threads_in(lines: Iterable[str]) -> list[Thread]:
    """Return the threads of a dump; lines that are no part of one are passed over."""
    threads: list[list[StackFrame]] = []
    for line in lines:
        if _HEAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(StackFrame(frame["file"], int(frame["line"]), frame["function"]))
    return [Thread(tuple(frames)) for frames in threads if frames]


def main_thread(threads: Sequence[Thread]) -> Thread | None:
    """Return the thread that runs the program; None where no stack was got."""
    return next((thread for thread in threads if thread.is_main), None)


def worker_thread(threads: Sequence[Thread]) -> Thread | None:
    """Return the thread that does the work of a forked child: it began as whichever thread forked it."""
    own = (thread for thread in threads if any(frame.own for frame in thread.frames))
    return main_thread(threads) or next(own, next(iter(threads), None))


def feeding_thread(threads: Sequence[Thread]) -> Thread | None:
    """Return the thread that makes the next batch, where it is at one."""
    fetching = (thread for thread in threads if any(frame.function == "_collate" for frame in thread.frames))
    return next((thread for thread in fetching if not thread.is_main), None)

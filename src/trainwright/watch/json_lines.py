"""Reading JSON Lines that somebody else writes: what is new, what is newest, and an even choice of a long file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

TAIL_BYTES: Final = 256 * 1024


class Follower:
    """Yields what is appended to a file; one that was replaced or shortened is read from its start again."""

    def __init__(self, path: Path, *, from_end: int | None = None) -> None:
        """Begin at the start, or `from_end` bytes before the end."""
        self._path, self._from_end = path, from_end
        self._place: tuple[int, int] | None = None
        """The file's inode, and up to where its whole lines have been read."""

    def new(self, containing: bytes = b"") -> Iterator[dict[str, Any]]:
        """Yield the whole records since the last call whose text contains this; none where there is no file."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            if self._place is None:
                start = max(0, status.st_size - self._from_end) if self._from_end is not None else 0
                self._place = (status.st_ino, _line_start(file, start))
            inode, offset = self._place
            if status.st_ino != inode or status.st_size < offset:
                offset = 0
            file.seek(offset)
            text = file.read()
            whole = text.rfind(b"\n") + 1
            self._place = (status.st_ino, offset + whole)
        yield from _records(text[:whole], containing)


def newest(path: Path) -> dict[str, Any] | None:
    """Return the last whole record of a file of any length, None if it has none."""
    records = list(Follower(path, from_end=TAIL_BYTES).new())
    return records[-1] if records else None


def evenly(path: Path, count: int) -> list[dict[str, Any]]:
    """Return at most `count` records at even distances in the file, the first and the last of them included.

    A long file costs as much as a short one, as only the lines that are asked for are read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        if size <= TAIL_BYTES:
            whole_file = list(_records(file.read(size)))
            step = max(1, -(-len(whole_file) // count))
            return whole_file[:-1:step] + whole_file[-1:]
        records: list[dict[str, Any]] = []
        last_start = -1
        for number in range(count - 1):
            start = _line_start(file, size * number // (count - 1))
            if start == last_start:
                continue
            last_start = start
            file.seek(start)
            records += _records(file.readline())
    final = newest(path)
    return records + ([final] if final is not None else [])


def _line_start(file: BinaryIO, offset: int) -> int:
    """Return where the first line begins at or after `offset`."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    file.readline()
    return file.tell()


def _records(text: bytes, containing: bytes = b"") -> Iterator[dict[str, Any]]:
    for line in _lines(text, containing) if containing else text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _lines(text: bytes, containing: bytes) -> Iterator[bytes]:
    """Yield the lines with something rare in them, without cutting up all the others."""
    hit = text.find(containing)
    while hit >= 0:
        end = text.find(b"\n", hit)
        end = len(text) if end < 0 else end
        yield text[text.rfind(b"\n", 0, hit) + 1 : end]
        hit = text.find(containing, end)

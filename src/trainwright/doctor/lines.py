"""The lines of a log of any size, in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trainwright.hardware.reading import printable

_CHUNK_BYTES: Final = 2**20
LONGEST_LINE_BYTES: Final = 2**14
"""Of a longer line, only the beginning and the end are looked at."""


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) without its end; a progress bar's states, parted by carriage returns, share a number."""
    number = 1
    for line in _whole_lines(path):
        if b"\r" in line:
            for part in line.split(b"\r"):
                if part:
                    yield number, _cut(part)
        else:
            yield number, _cut(line)
        number += 1


def _whole_lines(path: Path) -> Iterator[bytes]:
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            if len(rest) > _CHUNK_BYTES:
                rest = _cut(rest)
    if rest:
        yield rest


def _cut(line: bytes) -> bytes:
    half = LONGEST_LINE_BYTES // 2
    return line if len(line) <= LONGEST_LINE_BYTES else line[:half] + b" ... " + line[-half:]


def shown(line: str, longest: int = 300) -> str:
    """Return a line of a foreign log as it may be shown: nothing that a terminal would obey, and not endless."""
    clean = printable(line.expandtabs(4).strip())
    return clean if len(clean) <= longest else f"{clean[: longest - 60]} ... {clean[-50:]}"


def first_lines(path: Path, count: int) -> list[str]:
    """Return the beginning of a file, as text."""
    return [line.decode("utf-8", "replace") for _, line in itertools.islice(lines_of(path), count)]

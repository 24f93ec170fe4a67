"""The lines of a log of any size, in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from trainwright.hardware.reading import printable

_CHUNK_BYTES: Final = 2**20
LONGEST_LINE_BYTES: Final = 2**14
"""Of a longer line, only the beginning and the end are looked at."""


def blocks_of(path: Path) -> Iterator[tuple[Sequence[int], list[bytes]]]:
    """Yield many lines at once, without their ends, beside their numbers.

    A progress bar's states, parted by carriage returns, share a number.
    """
    first = 1
    for lines in _whole_lines(path):
        numbers: Sequence[int] = range(first, first + len(lines))
        first += len(lines)
        if b"\r" in b"".join(lines):
            parts = [[part for part in line.split(b"\r") if part] if b"\r" in line else [line] for line in lines]
            numbers = [number for number, parted in zip(numbers, parts, strict=True) for _ in parted]
            lines = [part for parted in parts for part in parted]
        yield numbers, [line if len(line) <= LONGEST_LINE_BYTES else _cut(line) for line in lines]


def _whole_lines(path: Path) -> Iterator[list[bytes]]:
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            yield lines
            if len(rest) > _CHUNK_BYTES:
                rest = _cut(rest)
    if rest:
        yield [rest]


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of `blocks_of` one by one."""
    return itertools.chain.from_iterable(lines for _, lines in blocks_of(path))


def _cut(line: bytes) -> bytes:
    half = LONGEST_LINE_BYTES // 2
    return line[:half] + b" ... " + line[-half:]


def shown(line: str, longest: int = 300) -> str:
    """Return a line of a foreign log as it may be shown: nothing that a terminal would obey, and not endless."""
    clean = printable(line.expandtabs(4).strip())
    return clean if len(clean) <= longest else f"{clean[: longest - 60]} ... {clean[-50:]}"


def first_lines(path: Path, count: int) -> list[str]:
    """Return the beginning of a file, as text."""
    return [line.decode("utf-8", "replace") for line in itertools.islice(lines_of(path), count)]

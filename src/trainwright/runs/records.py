"""Append-only JSON Lines: events, metrics and samples of a run, one writer each."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainwright.runs.writing import plain

_AT_ONCE: Final = 256


def append(path: Path, record: Mapping[str, object]) -> None:
    """Add one record as one line; it is in the kernel's hands, and so survives the process, when this returns."""
    line = json.dumps(plain(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            # A killed writer left half a line; without this the new record would be glued to it and lost too.
            line = b"\n" + line
        while line:
            line = line[os.write(fd, line) :]
    finally:
        os.close(fd)


@dataclass
class PassedOver:
    """How many records a reader could make nothing of."""

    count: int = 0


def read(path: Path, passed_over: PassedOver | None = None) -> Iterator[dict[str, Any]]:
    """Yield every whole record, oldest first; a missing file has no records.

    Lines that a kill cut short, and whatever else is no record, are passed over and counted.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        while lines := list(itertools.islice(file, _AT_ONCE)):
            parsed = _parsed(lines)
            valid = [record for record in parsed if isinstance(record, dict)]
            if passed_over is not None:
                passed_over.count += len(parsed) - len(valid)
            yield from valid


def _parsed(lines: Sequence[bytes]) -> list[Any]:
    """Return what the lines hold: parsed together, which takes half as long, unless there is something wrong."""
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        values = []
    return values if len(values) == len(lines) else [_parsed_alone(line) for line in lines]


def _parsed_alone(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None

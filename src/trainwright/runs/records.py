"""Append-only JSON Lines: events, metrics and samples of a run, one writer each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainwright.runs.writing import plain


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


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every whole record, oldest first, without lines that a kill cut short; a missing file has no records."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record

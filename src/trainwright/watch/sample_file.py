"""system.jsonl: one line a sample, bounded in size by thinning what is old."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from trainwright.runs.records import append
from trainwright.runs.writing import TEMPORARY_PREFIX, write_new
from trainwright.watch.samples import Sample

LIMIT_BYTES: Final = 16 * 2**20


class SampleFile:
    """The samples of one node; this process is their only writer."""

    def __init__(self, path: Path, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path, self._limit_bytes = path, limit_bytes

    def add(self, sample: Sample) -> None:
        """Append a sample; should the file be too large then, leave out every second one of its older three quarters.

        So the newest quarter is whole and the oldest samples are the thinnest, whatever the length of the run; the
        first one always stays.
        """
        append(self._path, sample.to_json())
        if self._path.stat().st_size > self._limit_bytes:
            self._thin()

    def _thin(self) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        older, newest = lines[: 3 * len(lines) // 4], lines[3 * len(lines) // 4 :]
        temporary = self._path.with_name(f"{TEMPORARY_PREFIX}{self._path.name}")
        temporary.unlink(missing_ok=True)
        write_new(temporary, b"".join([*older[::2], *newest]))
        temporary.replace(self._path)

"""From rows to a token cache: what is kept, cut, dropped and counted."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trainwright.errors import UserError
from trainwright.train.data.cache import CacheWriter
from trainwright.train.data.problems import Problems, RowError
from trainwright.train.data.rows import Located
from trainwright.train.tasks.protocol import Sample, Task, encode_rows, truncate

_ROWS_AT_ONCE = 1000
_PROGRESS_EVERY_S = 10.0


@dataclass
class Counts:
    """What became of the rows of one part of the data."""

    rows: int = 0
    kept: int = 0
    truncated: int = 0
    """Kept, but cut to max_length."""
    dropped_empty: int = 0
    """Nothing to learn in them: no answer, or no text."""
    dropped_too_long: int = 0
    """Longer than max_length, with `too_long: drop`."""
    dropped_cut_away: int = 0
    """Nothing left to learn after cutting: the prompt alone fills max_length."""

    def describe(self) -> str:
        """Return one line for people; only what happened is named."""
        happened = {
            "cut to max_length": self.truncated,
            "dropped as longer than max_length": self.dropped_too_long,
            "dropped as nothing to learn was left after the cut": self.dropped_cut_away,
            "dropped as there was nothing to learn": self.dropped_empty,
        }
        parts = [f"{count:,} {what}" for what, count in happened.items() if count]
        return f"{self.rows:,} rows read, {self.kept:,} kept" + "".join(f", {part}" for part in parts)


@dataclass
class DataPart:
    """One part of the data on its way into its cache: training or evaluation."""

    name: str
    writer: CacheWriter
    counts: Counts = dataclasses.field(default_factory=Counts)
    example: Sample | None = None
    """The first sample kept."""


def encode_into(
    rows: Iterable[Located],
    task: Task,
    part_of: Callable[[int], DataPart | None],
    *,
    max_length: int,
    too_long: Literal["truncate", "drop", "error"],
    problems: Problems,
) -> None:
    """Encode rows and append each to the part that `part_of` its number (from 0) gives; None leaves it out.

    Raises:
        UserError: at the tenth problem. The others are left in `problems` for the caller to raise.
    """
    for first, batch in _batches(rows):
        for number, (location, _), sample in zip(
            itertools.count(first), batch, encode_rows(task, [row for _, row in batch])
        ):
            if isinstance(sample, RowError):
                problems.add(location, sample)
            elif (part := part_of(number)) is not None:
                _append(part, task, sample, location, max_length, too_long, problems)


def _append(
    part: DataPart,
    task: Task,
    sample: Sample | None,
    location: str,
    max_length: int,
    too_long: Literal["truncate", "drop", "error"],
    problems: Problems,
) -> None:
    counts = part.counts
    counts.rows += 1
    targets = 0 if sample is None else task.targets(sample)
    if sample is None or targets == 0:
        counts.dropped_empty += 1
        return
    longest = max(len(tokens) for tokens in sample.values())
    if longest > max_length:
        if too_long == "error":
            problems.add(location, f"{longest:,} tokens; data.max_length is {max_length:,}, and data.too_long is error")
            return
        if too_long == "drop":
            counts.dropped_too_long += 1
            return
        sample = truncate(task, sample, max_length)
        targets = task.targets(sample)
        if targets == 0:
            counts.dropped_cut_away += 1
            return
        counts.truncated += 1
    part.writer.append(sample, targets)
    counts.kept += 1
    if part.example is None:
        part.example = sample


def _batches(rows: Iterable[Located]) -> Iterator[tuple[int, Sequence[Located]]]:
    iterator = iter(rows)
    done, began = 0, time.monotonic()
    said = began
    while batch := list(itertools.islice(iterator, _ROWS_AT_ONCE)):
        yield done, batch
        done += len(batch)
        if time.monotonic() - said > _PROGRESS_EVERY_S:
            said = time.monotonic()
            print(f"tokenizing: {done:,} rows, {done / (said - began):,.0f} rows/s", file=sys.stderr, flush=True)


def require_some(part: DataPart, source: str) -> None:
    """Raise a UserError if no row of the part can be learned from, saying what became of them."""
    if part.counts.kept == 0:
        raise UserError(
            f"data: no row of {source} can be used for {part.name}",
            problems=[part.counts.describe()],
            hints=[
                "raise data.max_length if rows were cut or dropped as too long; check data.columns if they are empty"
            ],
        )

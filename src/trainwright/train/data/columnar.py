"""Rows out of parquet and Arrow files, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainwright.errors import UserError
from trainwright.train.data.problems import Problems

_BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20


def column_names(kind: str, path: Path) -> list[str]:
    """Return the names of the columns of a parquet or Arrow file."""
    try:
        if kind == "parquet":
            with pq.ParquetFile(path) as file:
                return list(file.schema_arrow.names)
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
            return list(reader.schema.names)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def rows(
    kind: str, path: Path, columns: Sequence[str] | None, problems: Problems
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the rows of a file with their locations (`name: row 12`, from 1); rows with invalid text are noted."""
    number = 0
    try:
        for batch in _batches(kind, path, columns):
            for row in _values(batch):
                number += 1
                if isinstance(row, UnicodeDecodeError):
                    problems.add(f"{path}: row {number}", f"invalid UTF-8: {row.reason}")
                else:
                    yield f"{path}: row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _batches(kind: str, path: Path, columns: Sequence[str] | None) -> Iterator[Any]:
    if kind == "parquet":
        # A buffered stream and no pre-buffering: else whole row groups, often 100s of MB, are held in memory.
        with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            names = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
            yield from file.iter_batches(batch_size=_BATCH_ROWS, columns=names, use_threads=False)
        return
    # Read, not mapped: mapped pages count as resident memory until the system takes them back.
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        for batch in reader:
            names = batch.schema.names if columns is None else [name for name in columns if name in batch.schema.names]
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.select(names).slice(start, _BATCH_ROWS)


def _values(batch: Any) -> list[dict[str, object] | UnicodeDecodeError]:
    try:
        values: list[dict[str, object] | UnicodeDecodeError] = batch.to_pylist()
    except UnicodeDecodeError:
        return [_value(batch.slice(index, 1)) for index in range(batch.num_rows)]
    return values


def _value(one: Any) -> dict[str, object] | UnicodeDecodeError:
    try:
        value: dict[str, object] = one.to_pylist()[0]
    except UnicodeDecodeError as error:
        return error
    return value


def _damaged(path: Path, error: Exception) -> UserError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(f"data: {path} cannot be read: {first}", hints=["is the file complete? copy or make it again"])

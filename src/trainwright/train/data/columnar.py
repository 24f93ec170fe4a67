"""Rows out of parquet and Arrow files, a batch at a time.

A few kilobytes of parquet can stand for gigabytes: one long text under a million rows, or zeros under zstd. So rows are
decoded a few at a time, what unpacks beyond reason is refused by what the file says of itself, and a row may be as
large as a line of JSON and no larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainwright.errors import UserError
from trainwright.train.data.problems import Problems

LARGEST_ROW_BYTES = 8 * 1024 * 1024
"""A larger row is a mistake in the data more often than an example, and would have to be held in memory whole."""
_BATCH_ROWS = 32
"""More are hardly faster, and each may be as long as the longest text."""
_BATCH_BYTES = 64 * 1024 * 1024
_BUFFER_BYTES = 1 << 20
_UNPACKED_BYTES = 16 * 1024 * 1024
_UNPACKED_TIMES = 200
"""Text shrinks to a tenth, and rarely to a fiftieth."""


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
                elif isinstance(row, int):
                    problems.add(
                        f"{path}: row {number}",
                        f"the row has {row / 2**20:,.0f} MiB, more than {LARGEST_ROW_BYTES // 2**20} MiB",
                    )
                else:
                    yield f"{path}: row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _batches(kind: str, path: Path, columns: Sequence[str] | None) -> Iterator[Any]:
    if kind == "parquet":
        yield from _parquet_batches(path, columns)
        return
    # Read, not mapped: mapped pages count as resident memory until the system takes them back.
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
        for batch in reader:
            names = batch.schema.names if columns is None else [name for name in columns if name in batch.schema.names]
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.select(names).slice(start, _BATCH_ROWS)


def _parquet_batches(path: Path, columns: Sequence[str] | None) -> Iterator[Any]:
    # A buffered stream and no pre-buffering: else whole row groups, often 100s of MB, are held in memory.
    with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        names = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
        for group in range(file.num_row_groups):
            chunks = _chunks(file.metadata.row_group(group), names)
            _require_reasonable(path, chunks)
            if repeated := [chunk.path_in_schema for chunk in chunks if _repeats_long_texts(path, group, chunk)]:
                with pq.ParquetFile(
                    path, buffer_size=_BUFFER_BYTES, pre_buffer=False, read_dictionary=repeated
                ) as compact:
                    yield from _of_group(compact, group, names)
            else:
                yield from _of_group(file, group, names)


def _of_group(file: Any, group: int, names: list[str] | None) -> Iterator[Any]:
    yield from file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=names, use_threads=False)


def _chunks(group: Any, names: Sequence[str] | None) -> list[Any]:
    """Return what the file says of each column of texts or bytes in a row group."""
    chunks = [group.column(index) for index in range(group.num_columns)]
    read = [chunk for chunk in chunks if names is None or chunk.path_in_schema.split(".")[0] in names]
    return [chunk for chunk in read if chunk.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")]


def _require_reasonable(path: Path, chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        packed, unpacked = chunk.total_compressed_size, chunk.total_uncompressed_size
        if unpacked > _UNPACKED_BYTES and unpacked > _UNPACKED_TIMES * packed:
            raise UserError(
                f"data: {path} cannot be read: column {chunk.path_in_schema} unpacks from {packed:,} bytes to "
                f"{unpacked:,}",
                hints=["write the file again with shorter rows, or as .jsonl"],
            )


def _repeats_long_texts(path: Path, group: int, chunk: Any) -> bool:
    """Whether a list may hold the same long text so often that it must stay a reference until its size is known."""
    column = chunk.path_in_schema.split(".")[0]
    if column == chunk.path_in_schema or not {"RLE_DICTIONARY", "PLAIN_DICTIONARY"} & set(chunk.encodings):
        return False
    if chunk.num_values * chunk.total_uncompressed_size <= _BATCH_BYTES:
        return False
    with pq.ParquetFile(
        path, buffer_size=_BUFFER_BYTES, pre_buffer=False, read_dictionary=[chunk.path_in_schema]
    ) as file:
        first = next(file.iter_batches(batch_size=1, row_groups=[group], columns=[chunk.path_in_schema]), None)
    longest = 0 if first is None else max(map(_longest_in_dictionary, first.columns))
    return bool(chunk.num_values * longest > _BATCH_BYTES)


def _longest_in_dictionary(array: Any) -> int:
    if isinstance(array, pa.DictionaryArray):
        return pc.max(pc.binary_length(array.dictionary)).as_py() or 0
    inner = array.flatten() if pa.types.is_nested(array.type) else []
    return max(map(_longest_in_dictionary, [inner] if isinstance(inner, pa.Array) else inner), default=0)


def _bytes_of(array: Any) -> int:
    """Bytes of all values, those that stand in a dictionary counted as often as they are used."""
    if isinstance(array, pa.DictionaryArray):
        if not (pa.types.is_string(array.type.value_type) or pa.types.is_binary(array.type.value_type)):
            return 8 * len(array)
        return pc.sum(pc.take(pc.binary_length(array.dictionary), array.indices)).as_py() or 0
    if pa.types.is_struct(array.type):
        return sum(map(_bytes_of, array.flatten()))
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _bytes_of(array.flatten())
    return int(array.nbytes)


def _values(batch: Any) -> Iterable[dict[str, object] | UnicodeDecodeError | int]:
    """Return the rows; in place of one that is too large its bytes, and the error of one that is no text."""
    if sum(map(_bytes_of, batch.columns)) > LARGEST_ROW_BYTES:
        return (_value(batch.slice(index, 1)) for index in range(batch.num_rows))
    try:
        values: list[dict[str, object] | UnicodeDecodeError | int] = batch.to_pylist()
    except UnicodeDecodeError:
        return (_value(batch.slice(index, 1)) for index in range(batch.num_rows))
    return values


def _value(one: Any) -> dict[str, object] | UnicodeDecodeError | int:
    size = sum(map(_bytes_of, one.columns))
    if size > LARGEST_ROW_BYTES:
        return size
    try:
        value: dict[str, object] = one.to_pylist()[0]
    except UnicodeDecodeError as error:
        return error
    return value


def _damaged(path: Path, error: Exception) -> UserError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(f"data: {path} cannot be read: {first}", hints=["is the file complete? copy or make it again"])

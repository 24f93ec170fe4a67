"""Rows out of files, one at a time, with the place of each."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from trainwright.errors import UserError
from trainwright.train.data import columnar
from trainwright.train.data.problems import Problems
from trainwright.train.data.sources import Source

Row = dict[str, object]
Located = tuple[str, Row]
"""A row and where it stands: `train.jsonl:12`, or `train.parquet: row 12` in files that have no lines."""

LONGEST_LINE_BYTES = columnar.LARGEST_ROW_BYTES
"""A longer line is a mistake in the data more often than a row, and would have to be held in memory whole."""
_PEEKED_ROWS = 100


def read_rows(
    source: Source, problems: Problems, *, columns: Sequence[str] | None = None, limit: int | None = None
) -> Iterator[Located]:
    """Yield the rows of a source with their locations, at most `limit`; columnar files give only `columns`.

    Rows that cannot be read are noted in `problems` and left out. Memory stays bounded whatever the size of the
    source, but for `.json`, which is read whole.
    """
    return itertools.islice(_rows(source, problems, columns), limit)


def column_names(source: Source) -> list[str]:
    """Return the names of the columns; for JSON, all that the first hundred rows have.

    Raises:
        UserError: there are no rows, or none of the first hundred can be read.
    """
    if source.kind in ("parquet", "arrow"):
        return columnar.column_names(source.kind, source.files[0])
    problems = Problems(source.name)
    names: dict[str, None] = {}
    for _, row in read_rows(source, problems, limit=_PEEKED_ROWS):
        names |= dict.fromkeys(row)
    if not names:
        problems.raise_if_any()
        raise UserError(f"data: {source.name} is empty", hints=["give a file with at least one row"])
    return list(names)


def _rows(source: Source, problems: Problems, columns: Sequence[str] | None) -> Iterator[Located]:
    for path in source.files:
        if source.kind == "jsonl" or (source.kind == "json" and _is_lines(path)):
            yield from _json_lines(path, problems)
        elif source.kind == "json":
            yield from _json_document(path, problems)
        elif source.kind == "csv":
            yield from _csv(path, problems)
        else:
            yield from columnar.rows(source.kind, path, columns, problems)


def _lines(file: BinaryIO, path: Path, problems: Problems) -> Iterator[tuple[int, str]]:
    """Yield numbered lines of text; a line that is none is noted, and yielded as an empty one."""
    for number in itertools.count(1):
        raw = file.readline(LONGEST_LINE_BYTES + 1)
        if not raw:
            return
        if len(raw) > LONGEST_LINE_BYTES:
            problems.add(f"{path}:{number}", f"the line is longer than {LONGEST_LINE_BYTES // 2**20} MiB")
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(LONGEST_LINE_BYTES)
            raw = b"\n"
        if b"\0" in raw:
            problems.add(f"{path}:{number}", f"a NUL byte at column {raw.index(0) + 1}")
            raw = b"\n"
        try:
            yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            problems.add(
                f"{path}:{number}", f"the byte 0x{raw[error.start]:02x} at column {error.start + 1} is no UTF-8"
            )
            yield number, "\n"


def _json_lines(path: Path, problems: Problems) -> Iterator[Located]:
    with path.open("rb") as file:
        for number, line in _lines(file, path, problems):
            if line.isspace() or not line:
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                problems.add(f"{path}:{number}", f"no valid JSON: {_json_mistake(error)}")
                continue
            if isinstance(row, dict):
                yield f"{path}:{number}", row
            else:
                problems.add(f"{path}:{number}", f"expected an object, found {_json_kind(row)}")


def _is_lines(path: Path) -> bool:
    """Whether a .json file really is JSON Lines, as many published ones are: two lines, each a value by itself."""
    with path.open("rb") as file:
        first, second = file.readline(LONGEST_LINE_BYTES), file.readline(LONGEST_LINE_BYTES)
    try:
        json.loads(first)
        json.loads(second)
    except (ValueError, RecursionError):
        return False
    return True


def _json_document(path: Path, problems: Problems) -> Iterator[Located]:
    try:
        document = json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        problems.add(f"{path}:{line}", f"the byte 0x{error.object[error.start]:02x} is no UTF-8")
        return
    except (json.JSONDecodeError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        problems.add(f"{path}:{line}", f"no valid JSON: {_json_mistake(error)}")
        return
    if isinstance(document, dict):
        arrays = [name for name, value in document.items() if isinstance(value, list)]
        if len(arrays) != 1:
            problems.add(
                f"{path}:1", f"expected an array of rows, or an object with one array; found {len(arrays)} arrays"
            )
            return
        document = document[arrays[0]]
    if not isinstance(document, list):
        problems.add(f"{path}:1", f"expected an array of rows, found {_json_kind(document)}")
        return
    for number, row in enumerate(document, 1):
        if isinstance(row, dict):
            yield f"{path}: item {number}", row
        else:
            problems.add(f"{path}: item {number}", f"expected an object, found {_json_kind(row)}")


def _csv(path: Path, problems: Problems) -> Iterator[Located]:
    csv.field_size_limit(LONGEST_LINE_BYTES)
    with path.open("rb") as file:
        lines = (line for _, line in _lines(file, path, problems))
        reader = csv.reader(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        header: list[str] | None = None
        number = 1
        while True:
            try:
                fields = next(reader, None)
            except csv.Error as error:
                problems.add(f"{path}:{number}", f"no valid CSV: {error}")
                return  # where the next row begins is not known after a broken quote
            if fields is None:
                return
            if not fields:
                number = reader.line_num + 1
                continue
            if header is None:
                header = fields
                twice = sorted({name for name in header if header.count(name) > 1})
                if twice:
                    problems.add(f"{path}:{number}", f"the header names {', '.join(twice)} twice")
                    return
            elif len(fields) != len(header):
                problems.add(f"{path}:{number}", f"{len(fields)} fields where the header has {len(header)}")
            else:
                yield f"{path}:{number}", dict(zip(header, fields, strict=True))
            number = reader.line_num + 1


def _json_mistake(error: json.JSONDecodeError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"{error.msg} at column {error.colno}"


def _json_kind(value: object) -> str:
    names = {list: "an array", dict: "an object", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")

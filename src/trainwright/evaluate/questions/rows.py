"""The rows of a file of questions: JSON Lines, a JSON array, CSV or Parquet, each row with the line it came from."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError, not_installed

MOST_PROBLEMS = 20
"""Named in one error; a wrong file has thousands."""

Row = tuple[int, Any]
"""Line number, or row number in a Parquet file, and what stands there."""


def read_rows(path: Path, suffix: str | None = None) -> list[Row]:
    """Return the rows of a file, by its own suffix or the one given; `.json` may be JSON Lines or one array.

    Raises:
        UserError: it cannot be read, or lines are not what the suffix says, all named with their numbers.
    """
    try:
        match suffix or path.suffix.lower():
            case ".csv":
                return list(_csv_rows(path))
            case ".parquet":
                return _parquet_rows(path)
            case ".jsonl" | ".json":
                return _json_rows(path)
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}", exit_code=ExitCode.MISSING) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", exit_code=ExitCode.STORAGE) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is none of it") from error
    raise UserError(f"{path} is no file of questions", hints=["name a .jsonl, .json, .csv or .parquet file"])


def refused(path: Path, problems: list[str]) -> UserError:
    """Return the error for a file whose rows are wrong, naming the first of them."""
    more = len(problems) - MOST_PROBLEMS
    shown = problems[:MOST_PROBLEMS] + ([f"... and {more:,} more"] if more > 0 else [])
    return UserError(f"{path} has rows that are no questions", problems=shown)


def _json_rows(path: Path) -> list[Row]:
    text = path.read_text(encoding="utf-8-sig")
    rows: list[Row] = []
    problems = []
    # Not splitlines(): a line separator such as U+2028 may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append((number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            problems.append(f"{path.name}:{number}: not JSON: {error}")
    if problems and (array := _array(text)) is not None:
        return array
    if problems:
        raise refused(path, problems)
    if len(rows) == 1 and isinstance(rows[0][1], list) and all(isinstance(item, dict) for item in rows[0][1]):
        return list(enumerate(rows[0][1], 1))
    return rows


def _array(text: str) -> list[Row] | None:
    try:
        array = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return list(enumerate(array, 1)) if isinstance(array, list) else None


def _csv_rows(path: Path) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise refused(path, [f"{path.name}:{reader.line_num}: not as many cells as the header has columns"])
            yield reader.line_num, row
    except csv.Error as error:
        raise refused(path, [f"{path.name}:{reader.line_num}: {error}"]) from error


def _parquet_rows(path: Path) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise not_installed(f"reading {path.name}", "pyarrow", instead="write the questions as .jsonl") from error
    try:
        return list(enumerate(parquet.read_table(path).to_pylist(), 1))
    except ArrowException as error:
        raise UserError(f"{path} is not a Parquet file: {error}") from error

"""Records that may be of any age, cut short or damaged: what is not what it should be is not available."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainwright.errors import UserError
from trainwright.runs.writing import read_json

_LARGEST: Final = 1e300
"""What lies beyond is no reading; a whole number may be longer than any float."""


def number(record: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number, None for anything else."""
    value = record.get(name)
    # By its very type, as JSON has no others: true and false are whole numbers to isinstance.
    return float(value) if type(value) in (float, int) and -_LARGEST < value < _LARGEST else None  # type: ignore[operator,arg-type]


def column(records: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """Return a number of every record; where all are as they should be this takes a third of the time."""
    values = [record.get(name) for record in records]
    if set(map(type, values)) == {float} and math.isfinite(sum(values)):  # type: ignore[arg-type]
        return values
    return [number(record, name) for record in records]


def whole(record: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number, None for anything else."""
    value = record.get(name)
    return value if type(value) is int else None


def text(record: Mapping[str, Any], name: str) -> str | None:
    """Return a text that is not empty, None for anything else."""
    value = record.get(name)
    return value if isinstance(value, str) and value else None


def mapping(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what is under a name, nothing if that is no mapping."""
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def mappings(record: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield the mappings of a list, none if there is no list."""
    value = record.get(name)
    yield from (item for item in value if isinstance(item, dict)) if isinstance(value, list) else ()


def document(path: Path, missing: list[str]) -> dict[str, Any]:
    """Return what a JSON file holds; if it cannot be read return nothing, and add why to `missing`."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        missing.append(f"there is no {path.name}")
    except UserError as error:
        missing.append(f"{path.name} cannot be read: {error.message.removeprefix(f'{path} ')}")
    except OSError as error:
        missing.append(f"{path.name} cannot be read: {error.strerror}")
    else:
        if isinstance(content, dict):
            return content
        missing.append(f"{path.name} holds something else than it should")
    return {}

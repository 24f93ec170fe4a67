"""Records that may be of any age, cut short or damaged: what is not what it should be is not available."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trainwright.errors import UserError
from trainwright.runs.records import PassedOver
from trainwright.runs.writing import read_json

_LARGEST: Final = 1e300
"""What lies beyond is no reading; a whole number may be longer than any float."""
_LARGEST_WHOLE: Final = 2**63

Kind = TypeVar("Kind")


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
    """Return a whole number of 64 bits, None for anything else."""
    value = record.get(name)
    return value if type(value) is int and -_LARGEST_WHOLE <= value < _LARGEST_WHOLE else None


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


def of_kind(kind: type[Kind], record: Mapping[str, Any], **parts: Any) -> Kind:
    """Return a dataclass of those values of a record that fit its fields; the others have their defaults.

    `parts` are fields that are read already.

    Raises:
        ValueError: a field without a default has no value that fits.
    """
    wanted, needed = _fields_of(kind)  # type: ignore[arg-type]
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, hint in wanted.items()
        if name in record and _fits(value := record[name], hint)
    }
    arguments = values | parts
    if lacking := [name for name in needed if name not in arguments]:
        raise ValueError(f"{kind.__name__} without {', '.join(lacking)}")
    return kind(**arguments)


def understood(
    read: Callable[[Any], Kind], records: Iterable[Mapping[str, Any]], passed_over: PassedOver | None = None
) -> Iterator[Kind]:
    """Yield what `read` makes of each record; those of which it makes nothing (ValueError) are counted."""
    for record in records:
        try:
            value = read(record)
        except ValueError:
            if passed_over is not None:
                passed_over.count += 1
            continue
        yield value


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the type of each field, and the names of those that must be there."""
    hints = get_type_hints(kind)
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    return {f.name: hints[f.name] for f in fields(kind)}, tuple(needed)


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin in (Mapping, dict):
        return isinstance(value, dict) and _all_fit(value.values(), inner[1])
    if origin is tuple:
        return isinstance(value, list | tuple) and _all_fit(value, inner[0])
    if hint in (int, float):
        return (whole if hint is int else number)({"": value}, "") is not None
    return hint is Any or (value is None if hint is type(None) else isinstance(value, hint))


def _all_fit(values: Iterable[Any], hint: Any) -> bool:
    return all(_fits(value, hint) for value in values)


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

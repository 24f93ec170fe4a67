"""What the job's schema says of a key path: the keys that may stand there, and what a value looks like."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from trainwright.job.origins import KeyPath, dotted
from trainwright.job.schema import Job

Shape = dict[str, Any]
"""A JSON Schema."""


@cache
def job_shape() -> Shape:
    """Return the JSON Schema of a job file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Job.model_json_schema()}


def _resolved(shape: Shape) -> Shape:
    if "$ref" not in shape:
        return shape
    target: Shape = job_shape()["$defs"][shape["$ref"].rpartition("/")[2]]
    return {**target, **{key: value for key, value in shape.items() if key != "$ref"}}


def _alternatives(shape: Shape) -> list[Shape]:
    """Return the shapes of a union, or the one shape there is."""
    resolved = _resolved(shape)
    return [_resolved(option) for option in resolved.get("anyOf", [resolved])]


def _children(shape: Shape, step: str | int) -> Iterator[Shape]:
    for option in _alternatives(shape):
        if isinstance(step, int):
            if "items" in option:
                yield option["items"]
        elif step in option.get("properties", {}):
            yield option["properties"][step]
        elif isinstance(option.get("additionalProperties"), dict):
            yield option["additionalProperties"]


def shape_at(path: KeyPath) -> Shape | None:
    """Return the shape of the value at a key path, or None where the schema has no such path."""
    shape: Shape | None = job_shape()
    for step in path:
        shape = next(_children(shape, step), None) if shape is not None else None
    return None if shape is None else _resolved(shape)


def key_names(path: KeyPath) -> list[str]:
    """Return the keys that may stand below a path; none where it holds no section or where every name is allowed."""
    shape = shape_at(path)
    names: list[str] = []
    for option in _alternatives(shape) if shape is not None else []:
        names += option.get("properties", {})
        names += option.get("propertyNames", {}).get("enum", [])
    return names


@cache
def sections_by_key() -> dict[str, list[str]]:
    """Return, for each key name, the sections in which it may stand; the empty name is the top level."""
    found: dict[str, list[str]] = {}

    def visit(path: KeyPath) -> None:
        for name in key_names(path):
            found.setdefault(name, []).append(dotted(path))
            visit((*path, name))

    visit(())
    return found


def description(path: KeyPath) -> str:
    """Return the documentation of a key, or nothing where there is none."""
    shape = shape_at(path)
    return "" if shape is None else str(shape.get("description", ""))


def choices(path: KeyPath) -> list[str]:
    """Return the words that a value may be, where the schema lists them."""
    shape = shape_at(path)
    words: list[str] = []
    for option in _alternatives(shape) if shape is not None else []:
        words += option.get("enum", [])
        words += [option["const"]] if "const" in option else []
    return words


def expected(path: KeyPath) -> str:
    """Return what the value at a path has to be, as the end of `expected ...`."""
    shape = shape_at(path)
    options = _alternatives(shape) if shape is not None else []
    phrases = [_phrase(option) for option in options if option.get("type") != "null"]
    return " or ".join(dict.fromkeys(phrases)) or "no value"


def _phrase(shape: Shape) -> str:
    if "const" in shape:
        return f"`{shape['const']}`"
    if "enum" in shape:
        return "one of " + ", ".join(f"`{word}`" for word in shape["enum"])
    if "examples" in shape:
        return "text such as " + ", ".join(f"`{example}`" for example in shape["examples"])
    match shape.get("type"):
        case "integer":
            return "a whole number" + _bounds(shape)
        case "number":
            return "a number" + _bounds(shape)
        case "boolean":
            return "`true` or `false`"
        case "array":
            members = " or ".join(_phrase(option) for option in _alternatives(shape["items"]))
            return f"a list of {members}"
        case "object":
            return "a mapping of `key: value`"
        case _:
            return "text"


def _bounds(shape: Shape) -> str:
    words = {
        "exclusiveMinimum": "above",
        "minimum": "of at least",
        "exclusiveMaximum": "below",
        "maximum": "of at most",
    }
    bounds = [f"{word} {shape[key]:g}" for key, word in words.items() if key in shape]
    return f" {' and '.join(bounds)}" if bounds else ""

"""What the schema of a YAML file says of a key path: the keys that may stand there, and what a value looks like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from trainwright.job.origins import KeyPath, dotted
from trainwright.job.renamed import EXPLANATIONS
from trainwright.job.schema import Job

Shape = dict[str, Any]
"""A JSON Schema."""
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, eq=False)
class FileKind(Generic[M]):
    """A kind of YAML file that users write, and what its schema says of each key path."""

    noun: str
    """As errors call it: `job`."""
    model: type[M]
    example: str
    """A line of such a file."""
    renamed: Mapping[str, str]
    """Names of other tools, with what they are called here."""
    where: str = ""
    """Where to find such files, as a hint."""

    @cached_property
    def shape(self) -> Shape:
        """The JSON Schema of the file."""
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **self.model.model_json_schema()}

    @cached_property
    def sections_by_key(self) -> dict[str, list[str]]:
        """For each key name, the sections in which it may stand; the empty name is the top level."""
        sections: dict[str, list[str]] = {}

        def visit(path: KeyPath) -> None:
            for name in self.key_names(path):
                sections.setdefault(name, []).append(dotted(path))
                visit((*path, name))

        visit(())
        return sections

    def shape_at(self, path: KeyPath) -> Shape | None:
        """Return the shape of the value at a key path, or None where the schema has no such path."""
        shape: Shape | None = self.shape
        for step in path:
            shape = next(self._children(shape, step), None) if shape is not None else None
        return None if shape is None else self._resolved(shape)

    def key_names(self, path: KeyPath) -> list[str]:
        """Return the keys that may stand below a path; none where it holds no section or every name is allowed."""
        names: list[str] = []
        for option in self._options(path):
            names += option.get("properties", {})
            names += option.get("propertyNames", {}).get("enum", [])
        return names

    def description(self, path: KeyPath) -> str:
        """Return the documentation of a key, or nothing where there is none."""
        shape = self.shape_at(path)
        return "" if shape is None else str(shape.get("description", ""))

    def choices(self, path: KeyPath) -> list[str]:
        """Return the words that a value may be, where the schema lists them."""
        words: list[str] = []
        for option in self._options(path):
            words += option.get("enum", [])
            words += [option["const"]] if "const" in option else []
        return words

    def expected(self, path: KeyPath) -> str:
        """Return what the value at a path has to be, as the end of `expected ...`."""
        phrases = [self._phrase(option) for option in self._options(path) if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(phrases)) or "no value"

    def _options(self, path: KeyPath) -> list[Shape]:
        shape = self.shape_at(path)
        return [] if shape is None else self._alternatives(shape)

    def _resolved(self, shape: Shape) -> Shape:
        if "$ref" not in shape:
            return shape
        target: Shape = self.shape["$defs"][shape["$ref"].rpartition("/")[2]]
        return {**target, **{key: value for key, value in shape.items() if key != "$ref"}}

    def _alternatives(self, shape: Shape) -> list[Shape]:
        """Return the shapes of a union, or the one shape there is."""
        resolved = self._resolved(shape)
        return [self._resolved(option) for option in resolved.get("anyOf", [resolved])]

    def _children(self, shape: Shape, step: str | int) -> Iterator[Shape]:
        for option in self._alternatives(shape):
            if isinstance(step, int):
                if "items" in option:
                    yield option["items"]
            elif step in option.get("properties", {}):
                yield option["properties"][step]
            elif isinstance(option.get("additionalProperties"), dict):
                yield option["additionalProperties"]

    def _phrase(self, shape: Shape) -> str:
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
                members = " or ".join(self._phrase(option) for option in self._alternatives(shape["items"]))
                return f"a list of {members}"
            case "object":
                return "a mapping of `key: value`"
            case _:
                return "text"


JOB = FileKind(
    noun="job",
    model=Job,
    example="name: my-run",
    renamed=EXPLANATIONS,
    where="`trainwright presets` lists the jobs that come with it",
)


def _bounds(shape: Shape) -> str:
    words = {
        "exclusiveMinimum": "above",
        "minimum": "of at least",
        "exclusiveMaximum": "below",
        "maximum": "of at most",
    }
    bounds = [f"{word} {shape[key]:g}" for key, word in words.items() if key in shape]
    return f" {' and '.join(bounds)}" if bounds else ""

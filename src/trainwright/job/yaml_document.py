"""Reading one YAML 1.2 document as plain values, with the place of every key.

The values are built from the parser's events: no object is ever constructed from a tag, nothing is expanded from an
alias, and every size is bounded while reading, not afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StreamMark
from ruamel.yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from trainwright.errors import UserError
from trainwright.job.origins import KeyPath, Origin, Problem
from trainwright.job.scalars import FORBIDDEN_TEXT, plain_value

MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_VALUES = 10_000

OriginAt = Callable[[int, int], Origin]
"""Gives the origin of what stands at a line and a column, both counted from 1."""


@dataclass
class Document:
    """The values of one document, the origin of each key path in the order of the text, and what was wrong.

    `readable` is false where the text is no YAML at all, so that nothing can be said about its keys.
    """

    values: Any = None
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    readable: bool = True

    def origin_of(self, path: KeyPath) -> Origin:
        """Return the origin of a path, or of the nearest part of it that was written."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, Origin("default"))


def read_file(path: Path, noun: str, *, where: str = "") -> str:
    """Return the text of a file of keys; raises UserError where there is no text file of at most 1 MB.

    `noun` and `where` are what errors call such a file, and where they say that others are.
    """
    try:
        if not path.exists():
            raise UserError(f"there is no {noun} file `{path}`", hints=[where] if where else [])
        if path.is_dir():
            raise UserError(f"`{path}` is a folder, not a {noun} file", hints=["name the YAML file in it"])
        if not path.is_file():
            raise UserError(f"`{path}` is not a regular file")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"the {noun} file `{path}` cannot be read: {reason}") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"`{path}` is larger than {MAX_BYTES:,} bytes: that is no {noun} file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", errors="replace")
        line, column = _line_and_column(before, len(before))
        raise UserError(
            f"`{path}` is not UTF-8 text",
            problems=[f"{path}:{line}:{column}: the byte 0x{data[error.start]:02x} is not UTF-8"],
            hints=["save the file as UTF-8"],
        ) from error


def read_keys(text: str, origin_at: OriginAt, example: str = "name: my-run") -> Document:
    """Return the document of a file of keys, such as a job; its top level must be a mapping."""
    document = read_yaml(text, origin_at)
    if document.readable and not isinstance(document.values, dict):
        trouble = "the file is empty" if document.values is None else "the top level is no mapping"
        text = f"{trouble}; a file of keys is written in lines of `key: value`, such as `{example}`"
        document.problems.append(Problem(origin_at(1, 1), (), text))
        document.readable = False
    return document


def read_yaml(text: str, origin_at: OriginAt) -> Document:
    """Return the one YAML 1.2 document in `text`; whatever is wrong with it is in its `problems`."""
    forbidden = FORBIDDEN_TEXT.search(text)
    if forbidden is not None:
        origin = origin_at(*_line_and_column(text, forbidden.start()))
        problem = Problem(origin, (), f"the character U+{ord(forbidden[0]):04X} is not allowed")
        return Document(problems=[problem], readable=False)
    return _Builder(text, origin_at).build()


def _line_and_column(text: str, index: int) -> tuple[int, int]:
    return text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)


class _UnreadableError(Exception):
    """The text cannot be read any further."""

    def __init__(self, mark: StreamMark, text: str) -> None:
        super().__init__(text)
        self.mark = mark


class _Builder:
    """Turns the parser's events into values, and notes where each key stands."""

    def __init__(self, text: str, origin_at: OriginAt) -> None:
        self._events = self._bounded_events(text)
        self._origin_at = origin_at
        self._mark = StreamMark("", 0, 0, 0)
        self._document = Document()

    def build(self) -> Document:
        try:
            next(self._events)
            start = next(self._events)
            if isinstance(start, DocumentStartEvent):
                self._refuse_directives(start)
                self._document.values = self._node(next(self._events), ())
                next(self._events)
                self._refuse_second_document(next(self._events))
        except _UnreadableError as error:
            self._add_problem(error.mark, (), str(error))
            self._document.readable = False
        return self._document

    def _bounded_events(self, text: str) -> Iterator[Event]:
        """Yield the events; the parser is lazy, so what is refused here is never parsed to its end."""
        depth = values = 0
        try:
            for event in YAML(typ="safe", pure=True).parse(text):
                self._mark = event.start_mark
                depth += isinstance(event, MappingStartEvent | SequenceStartEvent)
                depth -= isinstance(event, MappingEndEvent | SequenceEndEvent)
                values += isinstance(event, MappingStartEvent | SequenceStartEvent | ScalarEvent | AliasEvent)
                if depth > MAX_DEPTH:
                    raise _UnreadableError(event.start_mark, f"values are nested more than {MAX_DEPTH} deep")
                if values > MAX_VALUES:
                    raise _UnreadableError(event.start_mark, f"more than {MAX_VALUES:,} values: that is no job file")
                yield event
        except MarkedYAMLError as error:
            context = f" ({error.context})" if error.context else ""
            mark = error.problem_mark or self._mark
            raise _UnreadableError(mark, f"this is not YAML: {error.problem}{context}") from error
        except ValueError as error:
            # ruamel.yaml hands the number of an escape such as "\U00110000" to chr() unchecked.
            raise _UnreadableError(self._mark, "an escape after this place names no character") from error

    def _refuse_directives(self, start: DocumentStartEvent) -> None:
        if start.tags or (start.version is not None and tuple(start.version) != (1, 2)):
            raise _UnreadableError(start.start_mark, "the only directive that a job file may have is `%YAML 1.2`")

    def _refuse_second_document(self, event: Event) -> None:
        if not isinstance(event, StreamEndEvent):
            raise _UnreadableError(event.start_mark, "a second document starts here; a job file holds one")

    def _add_problem(self, mark: StreamMark, path: KeyPath, text: str) -> None:
        origin = self._origin_at(mark.line + 1, mark.column + 1)
        self._document.problems.append(Problem(origin, path, text))

    def _note_origin(self, mark: StreamMark, path: KeyPath) -> None:
        # The first place of a repeated key stays its place; the repetition is a problem of its own.
        self._document.origins.setdefault(path, self._origin_at(mark.line + 1, mark.column + 1))

    def _node(self, event: Any, path: KeyPath) -> Any:
        if not path:
            self._note_origin(event.start_mark, path)
        if isinstance(event, AliasEvent):
            self._add_problem(
                event.start_mark, path, f"the alias `*{event.anchor}` is not allowed; write the value out"
            )
            return None
        self._refuse_markup(event, path)
        if isinstance(event, ScalarEvent):
            return self._scalar(event, path)
        if isinstance(event, SequenceStartEvent):
            return list(self._items(path))
        return self._mapping(path)

    def _refuse_markup(self, event: ScalarEvent | CollectionStartEvent, path: KeyPath) -> None:
        if event.anchor is not None:
            self._add_problem(event.start_mark, path, f"the anchor `&{event.anchor}` is not allowed; remove it")
        if event.ctag is not None:
            self._add_problem(event.start_mark, path, "a tag such as `!!int` is not allowed; remove it")

    def _text(self, event: ScalarEvent, path: KeyPath) -> str:
        text: str = event.value
        forbidden = FORBIDDEN_TEXT.search(text)
        if forbidden is not None:
            self._add_problem(event.start_mark, path, f"the character U+{ord(forbidden[0]):04X} is not allowed")
        return FORBIDDEN_TEXT.sub("?", text)

    def _scalar(self, event: ScalarEvent, path: KeyPath) -> bool | int | float | str | None:
        text = self._text(event, path)
        if not event.implicit[0]:
            return text
        try:
            return plain_value(text)
        except ValueError as error:
            self._add_problem(event.start_mark, path, str(error))
            return None

    def _items(self, path: KeyPath) -> Iterator[Any]:
        for index, event in enumerate(self._events):
            if isinstance(event, SequenceEndEvent):
                return
            self._note_origin(event.start_mark, (*path, index))
            yield self._node(event, (*path, index))

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key in self._events:
            if isinstance(key, MappingEndEvent):
                break
            if not isinstance(key, ScalarEvent):
                raise _UnreadableError(key.start_mark, "a key is a plain name, not a list, a mapping or an alias")
            # A key is its text, whatever a value of that spelling would be: `no` and `1` are names here.
            name = self._text(key, path)
            self._refuse_markup(key, (*path, name))
            if name not in values:
                self._note_origin(key.start_mark, (*path, name))
                values[name] = self._node(next(self._events), (*path, name))
                continue
            first = self._document.origins[(*path, name)]
            self._add_problem(key.start_mark, (*path, name), f"the key is given twice; first at {first}")
            self._node(next(self._events), (*path, name))
        return values

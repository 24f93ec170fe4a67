"""What is wrong with a job, or another file of keys, in sentences that name the place, the key and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trainwright.errors import UserError
from trainwright.job import checks
from trainwright.job.origins import KeyPath, Problem, dotted
from trainwright.job.shape import FileKind
from trainwright.job.yaml_document import Document

_NAME_RULE = "use letters, digits, `.`, `_` and `-`, at most 100 of them, the first a letter or a digit"
_LONGEST_VALUE = 40


def invalid_file(source: str, kind: FileKind[Any], problems: Sequence[Problem], hints: Sequence[str] = ()) -> UserError:
    """Return the error that lists everything that is wrong with a file, in the order given."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return UserError(
        f"`{source}` is not a valid {kind.noun}: {count}", problems=[str(p) for p in problems], hints=hints
    )


def forbidden_content(document: Document) -> tuple[list[Problem], list[str]]:
    """Return the problems with secrets and broken lines, and the hints that go with them."""
    secrets = [Problem(document.origin_of(path), path, text) for path, text in checks.secrets(document.values)]
    broken = [Problem(document.origin_of(path), path, text) for path, text in checks.broken_lines(document.values)]
    return secrets + broken, [checks.SECRET_HINT] if secrets else []


def schema_problems(error: ValidationError, document: Document, kind: FileKind[Any]) -> tuple[list[Problem], list[str]]:
    """Return one problem for each key that does not fit the schema, and hints.

    Where a value may be of several kinds, pydantic reports each kind that it is not; here that is one problem.
    """
    by_path: dict[KeyPath, ErrorDetails] = {}
    for details in error.errors(include_url=False, include_input=False):
        by_path.setdefault(_key_path(details, document.values), details)
    # A problem inside a section tells more than that the section is not one of the other kinds allowed there.
    paths = [path for path in by_path if not any(other != path and other[: len(path)] == path for other in by_path)]
    problems = [
        Problem(document.origin_of(path), path, _text(by_path[path], path, document.values, kind)) for path in paths
    ]
    unknown = [path[:-1] for path in paths if _is_unknown_key(by_path[path])]
    return problems, [_valid_names(section, kind) for section in dict.fromkeys(unknown)]


def in_order(problems: Sequence[Problem], document: Document) -> list[Problem]:
    """Return the problems in the order of the file, those of overrides last."""
    places = {path: place for place, path in enumerate(document.origins)}

    def place(problem: Problem) -> tuple[bool, int]:
        starts = (problem.path[:end] for end in range(len(problem.path) + 1))
        return problem.origin.kind == "override", max(places.get(start, -1) for start in starts)

    return sorted(problems, key=place)


def _key_path(details: ErrorDetails, values: Any) -> KeyPath:
    """Return the key path of an error, leaving out the parts of pydantic's location that are no keys of the file."""
    path: KeyPath = ()
    for step in details["loc"]:
        if _holds(values, step):
            values = values[step]
        elif details["type"] != "missing" or step != details["loc"][-1]:
            continue
        path = (*path, step)
    return path


def _holds(values: Any, step: str | int) -> bool:
    if isinstance(values, list):
        return isinstance(step, int) and step < len(values)
    return isinstance(values, dict) and step in values


def _is_unknown_key(details: ErrorDetails) -> bool:
    return details["type"] == "extra_forbidden" or details["loc"][-1:] == ("[key]",)


def _text(details: ErrorDetails, path: KeyPath, values: Any, kind: FileKind[Any]) -> str:
    if _is_unknown_key(details):
        return unknown_key(path, kind)
    match details["type"]:
        case "missing":
            return f"this key is needed: {kind.description(path) or kind.expected(path)}"
        case "value_error":
            return str(details["ctx"]["error"])
        case "string_pattern_mismatch":
            return _NAME_RULE
        case _:
            return _wrong_value(path, _value_at(values, path), kind)


def unknown_key(path: KeyPath, kind: FileKind[Any]) -> str:
    """Return what to say of a key that the schema does not have at its place."""
    section, name = path[:-1], str(path[-1])
    sections = [place for place in kind.sections_by_key.get(name, []) if place != dotted(section)]
    near = difflib.get_close_matches(name, kind.key_names(section), n=1, cutoff=0.75)
    if name in kind.renamed:
        return f"unknown key; {kind.renamed[name]}"
    if near:
        return f"unknown key; did you mean `{near[0]}`?"
    if sections:
        places = " or ".join(f"`{place}`" if place else "the top level" for place in sections)
        return f"unknown key here; it belongs under {places}"
    everywhere = difflib.get_close_matches(name, kind.sections_by_key, n=1, cutoff=0.75)
    if everywhere:
        full_names = [f"{place}.{everywhere[0]}".removeprefix(".") for place in kind.sections_by_key[everywhere[0]]]
        return f"unknown key; did you mean {' or '.join(f'`{full_name}`' for full_name in full_names)}?"
    near = difflib.get_close_matches(name, kind.key_names(section), n=1, cutoff=0.5)
    return f"unknown key; did you mean `{near[0]}`?" if near else "unknown key"


def _valid_names(section: KeyPath, kind: FileKind[Any]) -> str:
    place = f"`{dotted(section)}`" if section else "the top level"
    return f"the keys of {place} are {', '.join(kind.key_names(section))}"


def _value_at(values: Any, path: KeyPath) -> Any:
    for step in path:
        values = values[step]
    return values


def _wrong_value(path: KeyPath, value: Any, kind: FileKind[Any]) -> str:
    wanted = kind.expected(path)
    text = f"expected {wanted}, not {_shown(value)}"
    if value is None:
        return f"{text}; give it a value or remove the key"
    if isinstance(value, str):
        near = difflib.get_close_matches(value, kind.choices(path), n=1, cutoff=0.6)
        if near:
            return f"{text}; did you mean `{near[0]}`?"
        if "true" in wanted and value.lower() in ("yes", "no", "on", "off", "y", "n"):
            return f"{text}; write `{'true' if value.lower() in ('yes', 'on', 'y') else 'false'}`"
        if "number" in wanted and value[:1].isdigit():
            return f"{text}; write a plain number, without quotes or units"
    elif isinstance(value, bool | int | float) and wanted == "text":
        return f"{text}; put it in quotes"
    return text


def _shown(value: Any) -> str:
    """Return a value as a person would name it, cut short where it is long."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    text = " ".join(str(value).split())
    short = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
    return f"the number `{short}`" if isinstance(value, int | float) else f"the text `{short}`"

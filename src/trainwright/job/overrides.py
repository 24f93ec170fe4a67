"""Overrides: `key.path=value` from the command line, laid over a job file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from trainwright.job.origins import KeyPath, Origin, Problem
from trainwright.job.scalars import FORBIDDEN_TEXT
from trainwright.job.yaml_document import Document, read_yaml

_OVERRIDE = Origin("override")


def with_overrides(document: Document, arguments: Sequence[str]) -> Document:
    """Return the document with each `key.path=value` laid over it, the later over the earlier.

    Values are read by the rules of the file: `2e-5` is a number, `[q_proj, v_proj]` a list, nothing is null; text
    needs no quotes. A value replaces what stands at its path whole.
    """
    merged = copy.deepcopy(document)
    for argument in arguments:
        _apply(merged, argument)
    return merged


def with_values(document: Document, values: Mapping[str, tuple[Origin, Any]]) -> Document:
    """Return the document with each value laid over the key of that name at its top level."""
    merged = copy.deepcopy(document)
    for key, (origin, value) in values.items():
        _put(merged, (key,), Document(values=value), origin)
    return merged


def _apply(merged: Document, argument: str) -> None:
    key, equals, text = argument.partition("=")
    path: KeyPath = tuple(key.split("."))
    if not equals or not all(path):
        shown = FORBIDDEN_TEXT.sub("?", argument)
        problem = Problem(_OVERRIDE, (), f"`{shown}` is not an override; write `key.path=value`")
        merged.problems.append(problem)
        return
    if FORBIDDEN_TEXT.search(key):
        merged.problems.append(Problem(_OVERRIDE, (), "a key holds a character that is not allowed"))
        return
    value = read_yaml(text, lambda line, column: _OVERRIDE)
    merged.problems += [Problem(_OVERRIDE, path + problem.path, problem.text) for problem in value.problems]
    if value.readable:
        _put(merged, path, value)


def _put(merged: Document, path: KeyPath, value: Document, by: Origin = _OVERRIDE) -> None:
    section = merged.values
    for depth, name in enumerate(path[:-1], start=1):
        if not isinstance(section.get(name), dict):
            section[name] = {}
            merged.origins[path[:depth]] = by
        section = section[name]
    section[path[-1]] = value.values
    merged.origins = {old: origin for old, origin in merged.origins.items() if old[: len(path)] != path}
    merged.origins |= {path + inner: by for inner in ((), *value.origins)}

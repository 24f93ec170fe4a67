"""The table of causes (causes.yaml): how each shows itself in a log, what it explains, and what mends it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML

from trainwright.out_of_memory import MESSAGES

Level = Literal["proof", "failure", "general", "warning", "collateral", "context"]


class Cause(BaseModel):
    """One entry of the table; what the keys mean is written at its head."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    title: str
    level: Level = "failure"
    signs: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sign:
    """One pattern of one cause; a line that has none of `needs` in it cannot match (empty: any may)."""

    cause: Cause
    pattern: re.Pattern[str]
    needs: tuple[bytes, ...]


@cache
def causes() -> Mapping[str, Cause]:
    """Return all causes by id."""
    text = (files("trainwright.doctor") / "causes.yaml").read_text(encoding="utf-8")
    return {id: Cause.model_validate({"id": id, **entry}) for id, entry in YAML(typ="safe").load(text).items()}


@cache
def signs() -> tuple[Sign, ...]:
    """Return every sign of every cause: the shared list of what means out of memory, then the table in its order."""
    known = causes()
    memory = [(known["host-oom" if _ON_HOST.search(message) else "device-oom"], message) for message in MESSAGES]
    of_table = [(cause, pattern) for cause in known.values() for pattern in cause.signs]
    return tuple(Sign(cause, re.compile(pattern), _literals(pattern)) for cause, pattern in memory + of_table)


_ON_HOST = re.compile("CPU|for an array|Cannot allocate memory")


def candidates(line: bytes) -> list[Sign]:
    """Return the signs that a line may have, by the literal text that each needs; the order is that of the table."""
    always, by_literal = _index()
    found = [number for literal, numbers in by_literal if literal in line for number in numbers]
    every = signs()
    return [every[number] for number in sorted({*always, *found})] if found else [every[number] for number in always]


@cache
def _index() -> tuple[tuple[int, ...], tuple[tuple[bytes, tuple[int, ...]], ...]]:
    """Return the signs that any line may have, and for each literal text the signs that need it."""
    by_literal: dict[bytes, list[int]] = {}
    for number, sign in enumerate(signs()):
        for literal in sign.needs:
            by_literal.setdefault(literal, []).append(number)
    always = tuple(number for number, sign in enumerate(signs()) if not sign.needs)
    return always, tuple((literal, tuple(numbers)) for literal, numbers in by_literal.items())


_ESCAPED_CLASS = re.compile(r"\\[wWdDsSbB]")
_QUANTIFIED = re.compile(r".(?:[?*]|\{0)")


def _literals(pattern: str) -> tuple[bytes, ...]:
    """Return, for each alternative of a pattern, the longest text that a match must contain; () where one has none."""
    if "(?i)" in pattern:
        return ()
    longest = [max(_runs(alternative), key=len, default="") for alternative in _alternatives(pattern)]
    return tuple(text.encode() for text in longest) if all(len(text) >= 3 for text in longest) else ()


def _alternatives(pattern: str) -> list[str]:
    """Split at each `|` that is outside of groups and classes; what is inside of them becomes one NUL."""
    parts, depth, in_class, index = [""], 0, False, 0
    while index < len(pattern):
        character = pattern[index]
        step = 2 if character == "\\" else 1
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            parts[-1] += "\0" if depth == 0 else ""
        elif character in "()":
            depth += 1 if character == "(" else -1
            parts[-1] += "\0"
        elif character == "|" and depth == 0:
            parts.append("")
        elif depth == 0:
            parts[-1] += pattern[index : index + step]
        index += step
    return parts


def _runs(alternative: str) -> list[str]:
    text = _ESCAPED_CLASS.sub("\0", alternative)
    text = _QUANTIFIED.sub("\0", re.sub(r"\\(.)", lambda found: "\1" + found[1], text))
    plain = re.sub("(?<!\1)[.^$+*?{}]", "\0", text).replace("\1", "")
    return plain.split("\0")

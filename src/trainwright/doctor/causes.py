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

from trainwright.doctor.literals import literals
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
    needs: tuple[str, ...]
    of_tracebacks: bool
    """Whether it is the last line of a traceback alone that it means."""


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
    return tuple(
        Sign(cause, re.compile(pattern), literals(pattern), cause.id.startswith("exception/"))
        for cause, pattern in memory + of_table
    )


_ON_HOST = re.compile("CPU|for an array|Cannot allocate memory")


class Sieve:
    """The signs that the lines of one text may have, by the literal text that each sign needs.

    To look for 460 texts in a megabyte at once takes as long as in 5,000 lines of it one by one.
    """

    def __init__(self, text: str) -> None:
        self._present = [(literal, numbers) for literal, numbers in _by_literal() if literal in text]

    def of(self, line: str, *, in_traceback: bool) -> list[Sign]:
        """Return the signs that a line of the text may have, in the order of the table."""
        numbers = [number for literal, needing in self._present if literal in line for number in needing]
        numbers += _without_literal(in_traceback)
        every = signs()
        return [sign for sign in map(every.__getitem__, sorted({*numbers})) if in_traceback or not sign.of_tracebacks]


@cache
def _by_literal() -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return each literal text with the signs that need it."""
    by_literal: dict[str, list[int]] = {}
    for number, sign in enumerate(signs()):
        for literal in sign.needs:
            by_literal.setdefault(literal, []).append(number)
    return tuple((literal, tuple(numbers)) for literal, numbers in by_literal.items())


@cache
def _without_literal(in_traceback: bool) -> tuple[int, ...]:
    """Return the signs that any line may have."""
    of_any = ((number, sign) for number, sign in enumerate(signs()) if not sign.needs)
    return tuple(number for number, sign in of_any if in_traceback or not sign.of_tracebacks)

"""Where a value of the job comes from, and how a problem with it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

KeyPath = tuple[str | int, ...]
"""The way to a value from the top of the job: `("method", "targets", 0)`."""


@dataclass(frozen=True)
class Origin:
    """Who set a value: nobody (`default`), a job file, an override or a preset; `location` is `file:line:column`."""

    kind: Literal["default", "file", "override", "preset"]
    location: str = ""

    def __str__(self) -> str:
        return self.location or self.kind


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a job, at one place; `path` is empty for what concerns no key."""

    origin: Origin
    path: KeyPath
    text: str

    def __str__(self) -> str:
        # A key may hold what a terminal would obey; the texts of problems do not repeat such characters.
        key = "".join(character if character.isprintable() else "?" for character in dotted(self.path))
        return ": ".join(part for part in (str(self.origin), key, self.text) if part)


def dotted(path: Sequence[str | int]) -> str:
    """Return a key path as people write it: `method.targets[0]`; a key without a name is shown as `""`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else "." + (step or '""')
    return text.removeprefix(".")

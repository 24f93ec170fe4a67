"""A reading that may be missing, text that others wrote, and the units of memory."""

from __future__ import annotations

import enum
from typing import Final, TypeAlias, TypeVar

GIB: Final = 2**30
MIB: Final = 2**20


class NotAvailable(enum.Enum):
    """The type of NOT_AVAILABLE; an enum, so that `is NOT_AVAILABLE` narrows a type."""

    NOT_AVAILABLE = "not available"

    def __str__(self) -> str:
        return self.value


NOT_AVAILABLE: Final = NotAvailable.NOT_AVAILABLE

T = TypeVar("T")
Reading: TypeAlias = T | NotAvailable


def printable(text: object) -> str:
    """Return text that others wrote (a process's name, a node's reason) without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in str(text))

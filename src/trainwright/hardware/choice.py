"""A decision and why it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value that was chosen for the user, with the reason as a plain sentence."""

    value: T
    reason: str

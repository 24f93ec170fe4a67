"""What was worked out for other layouts of the same model, found again by the identity of what it came from.

Anatomies and methods are known by identity, as hashing one takes longer than an answer; entries hold on to them, so
that an identity never comes to mean something else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Found = TypeVar("Found")
_MOST = 4096


class Recent(Generic[Found]):
    """Answers by `sources`, which count by identity, and by a key of values."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Found, tuple[object, ...]]] = {}

    def of(self, sources: tuple[object, ...], key: Hashable, make: Callable[[], Found]) -> Found:
        """Return the answer, made if it is not there yet."""
        whole = (tuple(map(id, sources)), key)
        known = self._known.get(whole)
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            known = self._known[whole] = make(), sources
        return known[0]

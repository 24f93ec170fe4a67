"""What is wrong with the data, gathered so that the user sees it all at once."""

from __future__ import annotations

from trainwright.errors import UserError

MOST_SHOWN = 10


class RowError(Exception):
    """A row that a task cannot read: the column and what is wrong with it."""

    def __init__(self, column: str, why: str) -> None:
        super().__init__(f"column `{column}`: {why}")


class Problems:
    """The problems of one data source, raised together at the tenth or at the end."""

    def __init__(self, source: str, hints: tuple[str, ...] = ()) -> None:
        self._source = source
        self._hints = hints
        self._found: list[str] = []

    def add(self, location: str, why: object) -> None:
        """Note one problem.

        Raises:
            UserError: when this is the tenth, naming all ten.
        """
        self._found.append(f"{location}: {why}")
        if len(self._found) == MOST_SHOWN:
            self._raise(f"{MOST_SHOWN} or more problems in the data of {self._source}; the first {MOST_SHOWN}:")

    def raise_if_any(self) -> None:
        """Raise a UserError naming every problem noted, if there is any."""
        if self._found:
            count = len(self._found)
            self._raise(f"{count} problem{'s' if count > 1 else ''} in the data of {self._source}:")

    def _raise(self, message: str) -> None:
        hints = self._hints or ("mend or remove these rows; nothing was trained",)
        raise UserError(message, problems=self._found, hints=hints)

"""Which column holds what, and the text of a row."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainwright.errors import UserError
from trainwright.train.data.problems import RowError

PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("input", "output"),
    ("input", "target"),
    ("source", "target"),
    ("query", "response"),
)
"""Column names that mean prompt and response, in the order in which they are looked for."""
CHAT_NAMES = ("messages", "conversation")
TEXT_NAMES = ("text", "content")
ColumnRole = Literal["prompt", "response", "text", "messages"]
MOST_CHARACTERS = 8 * 1024 * 1024


@dataclass(frozen=True)
class Columns:
    """The columns that a task reads: a pair, or a chat, or a text."""

    prompt: str | None = None
    response: str | None = None
    context: str | None = None
    """A second part of the prompt that a row may leave empty: `input` beside `instruction`."""
    messages: str | None = None
    text: str | None = None

    @property
    def names(self) -> list[str]:
        """The names of the columns, as they are in the data."""
        every = (self.prompt, self.context, self.response, self.messages, self.text)
        return [name for name in every if name is not None]

    def describe(self) -> str:
        """Return one line for people: `prompt: question, response: answer`."""
        roles = ("prompt", "context", "response", "messages", "text")
        return ", ".join(f"{role}: {getattr(self, role)}" for role in roles if getattr(self, role) is not None)

    def read_pair(self, row: Mapping[str, object]) -> tuple[str, str]:
        """Return the prompt and the response of a row; a context follows the instruction after an empty line.

        Raises:
            RowError: a column is missing, null, no text, or text that cannot be encoded.
        """
        assert self.prompt is not None and self.response is not None
        prompt, response = read_text(row, self.prompt), read_text(row, self.response)
        if self.context is not None and row.get(self.context) is not None:
            context = read_text(row, self.context)
            prompt = f"{prompt}\n\n{context}" if context else prompt
        return prompt, response


def find_columns(names: Sequence[str], named: Mapping[ColumnRole, str], *, pairs_only: bool = False) -> Columns:
    """Return the columns to read: those the job names, else found by their usual names.

    A chat goes before a pair, a pair before a text.

    Raises:
        UserError: a named column is not there, or none has a name that is known.
    """
    _check_named(names, named, pairs_only)
    if "messages" in named:
        return Columns(messages=named["messages"])
    if "text" in named:
        return Columns(text=named["text"])
    usual = _UsualNames(names)
    any_kind = not named and not pairs_only
    if any_kind and (messages := usual.first(CHAT_NAMES)) is not None:
        return Columns(messages=messages)
    pair = usual.pair_with(named.get("prompt"), named.get("response")) if named else usual.pair()
    if pair is not None:
        return pair
    if any_kind and (text := usual.first(TEXT_NAMES)) is not None:
        return Columns(text=text)
    hints = ["name the columns: data.columns={prompt: NAME, response: NAME}"]
    if not pairs_only:
        hints.append("or data.columns={text: NAME} for plain text, data.columns={messages: NAME} for chats")
    raise UserError(f"no column is known as a prompt and a response; the data has {_listed(names)}", hints=hints)


class _UsualNames:
    """Finds columns by names that are known, in whatever case they are written."""

    def __init__(self, names: Sequence[str]) -> None:
        self._by_lower = {name.lower(): name for name in reversed(names)}

    def first(self, candidates: Sequence[str]) -> str | None:
        return next((self._by_lower[name] for name in candidates if name in self._by_lower), None)

    def pair(self) -> Columns | None:
        for prompt, response in PAIRS:
            if prompt in self._by_lower and response in self._by_lower:
                context = self._by_lower.get("input") if prompt == "instruction" else None
                return Columns(prompt=self._by_lower[prompt], response=self._by_lower[response], context=context)
        return None

    def pair_with(self, prompt: str | None, response: str | None) -> Columns | None:
        """Return the pair of which the job names one column at least; a column is not both of them."""
        prompt = prompt or self.first([name for name, _ in PAIRS if self._by_lower.get(name) != response])
        response = response or self.first([name for _, name in PAIRS if self._by_lower.get(name) != prompt])
        return None if prompt is None or response is None else Columns(prompt=prompt, response=response)


def read_text(row: Mapping[str, object], column: str) -> str:
    """Return the text of one column.

    Raises:
        RowError: the column is missing, null, no text, too long, or holds NUL or half a surrogate pair.
    """
    if column not in row:
        raise RowError(column, "is missing")
    return check_text(row[column], column)


def check_text(value: object, column: str) -> str:
    """Return `value` if it is text that every tokenizer can take; else raise a RowError naming the column."""
    if value is None:
        raise RowError(column, "is null where text is expected")
    if not isinstance(value, str):
        raise RowError(column, f"expected text, found {type(value).__name__}")
    if len(value) > MOST_CHARACTERS:
        raise RowError(column, f"holds {len(value):,} characters; at most {MOST_CHARACTERS:,} are taken")
    if "\0" in value:
        raise RowError(column, "holds a NUL character")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RowError(column, f"holds half of a surrogate pair at character {error.start}") from error
    return value


def _check_named(names: Sequence[str], named: Mapping[ColumnRole, str], pairs_only: bool) -> None:
    problems, hints = [], []
    for role, name in named.items():
        if pairs_only and role in ("messages", "text"):
            problems.append(f"data.columns.{role}: this task reads a prompt and a response only")
        elif name not in names:
            problems.append(f"data.columns.{role}: there is no column `{name}`")
            hints += [f"did you mean `{near}`?" for near in difflib.get_close_matches(name, names, n=1)]
    kinds = {"pair" if role in ("prompt", "response") else role for role in named}
    if len(kinds) > 1:
        problems.append("data.columns names more than one kind: give prompt and response, or messages, or text")
    if problems:
        raise UserError(f"the columns do not fit; the data has {_listed(names)}", problems=problems, hints=hints)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"the columns {shown}" if names else "no columns"

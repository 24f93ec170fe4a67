"""A chat as pieces of text, with the assistant's words marked exactly.

With a chat template of the tokenizer, the text is the template's. Which part of it the assistant said is found
- from the template itself, if it marks that with `{% generation %}` (transformers' return_assistant_tokens_mask);
- else by rendering the chat a second time with an invisible mark before and after each answer. If taking the marks out
  again does not give the very text of the first rendering, the template rewrites answers, and the chat is refused.

Without a template the text is, for each message,

    <Role>:
    <content>

with an empty line in between, and the answer of the assistant ends with the tokenizer's end-of-sequence token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from trainwright.train.data.columns import check_text
from trainwright.train.data.problems import RowError

Message = dict[str, str]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: Unicode keeps them out of text that is exchanged


@dataclass(frozen=True)
class Piece:
    """A part of a document, as text to be tokenized by itself or as tokens; learned, or only read."""

    content: str | list[int]
    learned: bool


def read_messages(row: Mapping[str, object], column: str) -> list[Message]:
    """Return the messages of a row: a list of `{role, content}`, both text.

    Raises:
        RowError: anything else, naming the message.
    """
    messages = row.get(column)
    if not isinstance(messages, list):
        found = "nothing" if messages is None else type(messages).__name__
        raise RowError(column, f"expected a list of {{role, content}}, found {found}")
    chat = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise RowError(column, f"message {number}: expected {{role, content}}")
        chat.append({key: check_text(message[key], f"{column}[{number}].{key}") for key in ("role", "content")})
        if _OPEN in chat[-1]["content"] or _CLOSE in chat[-1]["content"]:
            raise RowError(column, f"message {number}: holds U+FDD0 or U+FDD1, which are no characters")
    return chat


def chat_pieces(messages: Sequence[Message], column: str, tokenizer: Any, eos: list[int]) -> list[Piece]:
    """Return the pieces of a chat; what the assistant says is learned.

    Raises:
        RowError: the template refuses the chat, or rewrites an answer so that it cannot be found in the text.
    """
    if not tokenizer.chat_template:
        return _plain(messages, eos)
    try:
        if _GENERATION.search(str(tokenizer.chat_template)):
            return _marked_by_template(messages, tokenizer)
        return _marked_by_us(messages, column, tokenizer)
    except TemplateError as error:
        raise RowError(column, f"the chat template refuses it: {error}") from error


def _plain(messages: Sequence[Message], eos: list[int]) -> list[Piece]:
    pieces = []
    for number, message in enumerate(messages):
        head = f"{message['role'].capitalize()}:\n"
        pieces.append(Piece(f"\n\n{head}" if number else head, False))
        answer = message["role"] == "assistant"
        pieces.append(Piece(message["content"], answer))
        if answer:
            pieces.append(Piece(eos, True))
    return pieces


def _marked_by_template(messages: Sequence[Message], tokenizer: Any) -> list[Piece]:
    encoded = tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    return [Piece([token], bool(said)) for token, said in pairs]


def _marked_by_us(messages: Sequence[Message], column: str, tokenizer: Any) -> list[Piece]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    for change in (str, str.strip):  # many templates strip what they are given
        marked = [
            m | {"content": f"{_OPEN}{change(m['content'])}{_CLOSE}"} if m["role"] == "assistant" else m
            for m in messages
        ]
        rendered = tokenizer.apply_chat_template(marked, tokenize=False)
        parts = re.split(f"[{_OPEN}{_CLOSE}]", rendered)
        if "".join(parts) == text and len(parts) == 1 + 2 * sum(m["role"] == "assistant" for m in messages):
            return [Piece(part, number % 2 == 1) for number, part in enumerate(parts)]
    raise RowError(
        column,
        "the chat template rewrites an answer, so that it cannot be found exactly in the text; "
        "mark the assistant's part in the template with {% generation %}, or use prompt and response",
    )

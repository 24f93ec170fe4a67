"""A chat as text or tokens, with the assistant's words marked exactly.

With a chat template of the tokenizer, the text is the template's. Which part of it the assistant said is found
- from the template itself, if it marks that with `{% generation %}` (transformers' return_assistant_tokens_mask);
- else by rendering the chat a second time with an invisible mark before and after each answer. If taking the marks out
  again does not give the very text of the first rendering, the template rewrites answers, and the chat is refused;
- of a prompt and its answer, then by what the rendering has more than that of the prompt alone, if that is the answer
  to the letter, space aside (a template that reads an answer's thoughts apart, as Qwen3's does, writes them again).
The tokens are those of `tokenizer.apply_chat_template`.

Without a template the text is, for each message,

    <Role>:
    <content>

with an empty line in between, and the answer of the assistant ends with the tokenizer's end-of-sequence token.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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


@dataclass(frozen=True)
class Rendered:
    """A chat as its template renders it, and from where to where the assistant speaks in it, end excluded."""

    text: str
    answers: tuple[tuple[int, int], ...]

    def learned(self, offsets: Sequence[tuple[int, int]]) -> list[bool]:
        """Return which tokens hold a part of an answer, by the characters that each token stands for."""
        kept = [False] * len(offsets)
        ends = [last for _, last in offsets]
        for start, end in self.answers:
            for index in range(bisect_right(ends, start), len(offsets)):
                first, last = offsets[index]
                # Some tokenizers leave space out of what a token stands for: one of space alone is empty, at its end.
                if first > end or (first == end and last > end):
                    break
                kept[index] = True
        return kept

    def pieces(self) -> list[Piece]:
        """Return the text cut where answers begin and end, for a tokenizer that does not tell characters."""
        cuts = [0, *(place for span in self.answers for place in span), len(self.text)]
        return [Piece(self.text[a:b], number % 2 == 1) for number, (a, b) in enumerate(pairwise(cuts))]


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
        check_marks(chat[-1]["content"], column, f"message {number}: ")
    return chat


def check_marks(text: str, column: str, where: str = "") -> None:
    """Raise a RowError where a text holds one of the two code points that mark answers here."""
    if _OPEN in text or _CLOSE in text:
        raise RowError(column, f"{where}holds U+FDD0 or U+FDD1, which are no characters")


def chat_document(messages: Sequence[Message], column: str, tokenizer: Any) -> Rendered | list[Piece]:
    """Return a chat in the tokenizer's chat template; what the assistant says is learned.

    Raises:
        RowError: the template refuses the chat, or rewrites an answer so that it cannot be found in the text.
    """
    found = _in_template(messages, column, tokenizer)
    if found is None:
        raise _rewritten(column, "or use prompt and response")
    return found


def pair_document(prompt: str, response: str, column: str, tokenizer: Any) -> Rendered | list[Piece]:
    """Return a prompt and its answer in the tokenizer's chat template; the answer, of `column`, is learned.

    Raises:
        RowError: the template refuses them, or rewrites the answer so that it cannot be found in the text.
    """
    check_marks(f"{prompt}{response}", column)
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    found = _in_template(messages, column, tokenizer) or _after_the_prompt(messages, tokenizer)
    if found is None:
        raise _rewritten(column, "or set data.template=plain")
    return found


def _in_template(messages: Sequence[Message], column: str, tokenizer: Any) -> Rendered | list[Piece] | None:
    """Return the chat as the template renders it, None where it rewrites an answer."""
    try:
        if _GENERATION.search(str(tokenizer.chat_template)):
            return _marked_by_template(messages, tokenizer)
        return _marked_by_us(messages, tokenizer)
    except TemplateError as error:
        raise RowError(column, f"the chat template refuses it: {error}") from error


def _rewritten(column: str, instead: str) -> RowError:
    return RowError(
        column,
        "the chat template rewrites an answer, so that it cannot be found exactly in the text; "
        f"mark the assistant's part in the template with {{% generation %}}, {instead}",
    )


def plain_chat(messages: Sequence[Message], eos: list[int]) -> list[Piece]:
    """Return a chat without a template; what the assistant says and its end are learned."""
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


def _marked_by_us(messages: Sequence[Message], tokenizer: Any) -> Rendered | None:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    for change in (str, str.strip):  # many templates strip what they are given
        marked = [
            m | {"content": f"{_OPEN}{change(m['content'])}{_CLOSE}"} if m["role"] == "assistant" else m
            for m in messages
        ]
        rendered = tokenizer.apply_chat_template(marked, tokenize=False)
        parts = re.split(f"[{_OPEN}{_CLOSE}]", rendered)
        if "".join(parts) == text and len(parts) == 1 + 2 * sum(m["role"] == "assistant" for m in messages):
            ends = list(accumulate(map(len, parts)))
            spans = zip(ends[::2], ends[1::2], strict=False)
            return Rendered(text, tuple((start, _up_to_eos(text, end, tokenizer)) for start, end in spans))
    return None


def _after_the_prompt(messages: Sequence[Message], tokenizer: Any) -> Rendered | None:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    prompt = tokenizer.apply_chat_template(list(messages[:-1]), tokenize=False, add_generation_prompt=True)
    if not text.startswith(prompt):
        return None
    said, wanted = text[len(prompt) :], "".join(messages[-1]["content"].split())
    places = [place for place, letter in enumerate(said) if not letter.isspace()][: len(wanted)]
    if not wanted or "".join(said[place] for place in places) != wanted:
        return None
    return Rendered(text, ((len(prompt), len(prompt) + places[-1] + 1),))


def _up_to_eos(text: str, end: int, tokenizer: Any) -> int:
    """Return where the space ends that a template puts between an answer and the end-of-sequence token (Llama 2)."""
    space = re.compile(rf"\s*(?={re.escape(tokenizer.eos_token)})").match(text, end)
    return space.end() if space else end

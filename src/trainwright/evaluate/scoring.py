"""What a response answers, read from the new tokens alone and outside the model's thinking, and whether it is right.

A response that names no answer is unparsable, and counted as such: it is never taken for one of the choices.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.thinking import without_thinking

_LABEL = r"[A-Za-z]|\d{1,2}"
_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?([^{}]*)\}")
_NAMED = (
    # Neither the article of "a unit", nor the beginning of 2.5, 2,000 or 2-step.
    rf"[(\[\"'“]*(?!(?-i:a)\s+\w)(?P<label>{_LABEL})(?![\w'’]|[.,]\d|-\w)"
    # "A or B" decides nothing.
    rf"(?!\s*[)\]]?\s*(?:or|and|/|,)\s*[(\[]?(?:{_LABEL})(?!\w))"
)
_SAID = re.compile(
    # "the answer is (B)", "Answer: 2", "final answer - option C", "the correct option is 3"; in Chinese too.
    r"(?:\b(?:answer|(?:correct|right|best)\s+(?:option|choice))\b(?:\s+(?:is|would\s+be|should\s+be|must\s+be))?"
    r"|答案(?:应该|應該)?(?:是|为|為)?)"
    rf"\s*[:：=\-]?\s*(?:(?:option|choice|number)\s*)?{_NAMED}",
    re.IGNORECASE,
)
_MENTIONED = re.compile(rf"\b(?:option|choice)\s*{_NAMED}", re.IGNORECASE)
_ALONE = re.compile(rf"(?:option|choice)?\s*[(\[]?\s*({_LABEL})\s*[)\].:]*", re.IGNORECASE)
_LEADING = re.compile(rf"(?:option|choice)?\s*[(\[]?\s*({_LABEL})\s*[)\].:]+\s+(.*)", re.IGNORECASE)
_NEXT_QUESTION = re.compile(r"\n\s*(?:question|q|user|human)\s*\d*\s*:", re.IGNORECASE)
_MARKUP = re.compile(r"[*`$_]+")
_PREFIX = re.compile(r"^.*?\b(?:final\s+)?answer\s*(?:is|:)\s*:?\s*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Score:
    """How an answer compares with the right one."""

    predicted: int | str | None
    """The number of the choice, or the words; None if unparsable."""
    is_correct: bool
    """The right choice; for a short answer an exact match."""
    f1: float | None = None
    """Of the words of a short answer."""

    @property
    def unparsable(self) -> bool:
        """Whether no answer could be read."""
        return self.predicted is None


def score(question: Question, response: str) -> Score:
    """Return the score of a response, which must be new tokens only, never the prompt."""
    if question.choices:
        number = parse_choice(response, question.choices)
        return Score(number, number is not None and number == question.answer)
    words = parse_short_answer(response)
    assert not isinstance(question.answer, int)
    matches = words is not None and any(normalized(words) == normalized(right) for right in question.answer)
    return Score(words, matches, max((f1(words or "", right) for right in question.answer), default=0.0))


def parse_choice(response: str, choices: Sequence[str]) -> int | None:
    """Return the number from 1 of the choice that a response names, or None.

    In this order: a first line that is a label and nothing else, or a label with its choice's text; LaTeX's boxed;
    the last "answer is ..."; the only "option ..." mentioned; the only choice whose text occurs; a leading label.
    """
    response = without_thinking(response)
    text = _own_words(response)
    first_line = text.partition("\n")[0].strip()
    if alone := _ALONE.fullmatch(first_line):
        return _number(alone[1], choices) or _by_text(first_line, choices)
    leading = _LEADING.match(first_line)
    if leading and (number := _number(leading[1], choices)) and _same(leading[2], choices[number - 1]):
        return number
    if boxed := _BOXED.findall(response):
        content = _MARKUP.sub("", boxed[-1]).strip()
        alone = _ALONE.fullmatch(content)
        return (alone and _number(alone[1], choices)) or _by_text(content, choices)
    if said := _labels(_SAID, text, choices):
        return said[-1]
    if len(mentioned := set(_labels(_MENTIONED, text, choices))) == 1:
        return mentioned.pop()
    if (number := _by_text(text, choices)) is not None:
        return number
    return _number(leading[1], choices) if leading else None


def parse_short_answer(response: str) -> str | None:
    """Return a short answer in words: what follows "answer:" where it says so, to the end of the line; None if none."""
    response = without_thinking(response)
    text = _own_words(response)
    if boxed := _BOXED.findall(response):
        return _MARKUP.sub("", boxed[-1]).strip() or None
    return _PREFIX.sub("", text).strip().partition("\n")[0].strip() or None


def normalized(text: str) -> str:
    """Return a text as SQuAD compares it: lower case, without punctuation, articles and further space.

    Rajpurkar et al., "SQuAD", EMNLP 2016, evaluation script.
    """
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


def f1(answer: str, right: str) -> float:
    """Return the F1 of an answer's words against the right one's, as SQuAD counts them."""
    said, wanted = normalized(answer).split(), normalized(right).split()
    if not said or not wanted:
        return float(said == wanted)
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted))


def _own_words(response: str) -> str:
    """Drop markup, and what a base model goes on to ask itself."""
    return _NEXT_QUESTION.split(_MARKUP.sub("", response).strip(), maxsplit=1)[0].strip()


def _labels(pattern: re.Pattern[str], text: str, choices: Sequence[str]) -> list[int]:
    return [number for match in pattern.finditer(text) if (number := _number(match["label"], choices))]


def _number(label: str, choices: Sequence[str]) -> int | None:
    number = int(label) if label.isdigit() else ord(label.upper()) - ord("A") + 1
    return number if 1 <= number <= len(choices) else None


def _same(said: str, choice: str) -> bool:
    return normalized(said) == normalized(choice) != ""


def _by_text(text: str, choices: Sequence[str]) -> int | None:
    """Return the only choice whose text occurs as whole words; one that lies within another that occurs is none."""
    said = f" {normalized(text)} "
    occurring = {
        number: words for number, choice in enumerate(choices, 1) if (words := f" {normalized(choice)} ") in said
    }
    apart = [
        number
        for number, words in occurring.items()
        if words.strip() and not any(words != other and words in other for other in occurring.values())
    ]
    return apart[0] if len(apart) == 1 else None

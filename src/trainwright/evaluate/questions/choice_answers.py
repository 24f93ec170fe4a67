"""Which choice a benchmark's answer means: benchmarks write a letter, a label, the text, or a number from 0 or 1."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NUMBERED = re.compile(r"\s*(\d+)\s*[.):]\s*(.*)", re.DOTALL)


def without_numbers(choices: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the choices without their own numbers, and these as labels, where each bears its own: `1. O-RU`."""
    matches = [NUMBERED.fullmatch(choice) for choice in choices]
    numbered = [match for number, match in enumerate(matches, 1) if match and int(match[1]) == number]
    if len(numbered) < len(choices):
        return tuple(choice.strip() for choice in choices), ()
    return tuple(match[2].strip() for match in numbered), tuple(match[1] for match in numbered)


def as_number(answer: object) -> int | None:
    """Return an answer that is a number, 3 or "3", else None."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer
    if isinstance(answer, str) and answer.strip().isascii() and answer.strip().isdigit():
        return int(answer)
    return None


def first_number(answers: Iterable[tuple[int, int]]) -> int | None:
    """Return the number of the first choice, 0 or 1, as all (answer, choices) pairs tell; None if they do not.

    An answer 0 says that they count from 0, an answer as high as the choices are many that they count from 1.
    """
    numbers = {0 if answer == 0 else 1 for answer, choices in answers if answer in (0, choices)}
    return numbers.pop() if len(numbers) == 1 else None


def chosen(answer: object, choices: Sequence[str], labels: Sequence[str], first: int) -> int | None:
    """Return the number from 1 of the choice that `answer` means, or None.

    It may be a label of the benchmark's own, the text of a choice, a number counted from `first`, or a letter.
    """
    word = str(answer).strip()
    if word in labels:
        return labels.index(word) + 1
    if isinstance(answer, str) and choices.count(word) == 1:
        return choices.index(word) + 1
    number = as_number(answer)
    if number is not None:
        return number - first + 1 if first <= number < first + len(choices) else None
    letter = word.strip("().").upper()
    if len(letter) == 1 and 0 <= ord(letter) - ord("A") < len(choices):
        return ord(letter) - ord("A") + 1
    return None

"""Chance that belongs to a question: the same whatever came before it, whoever asks, and on any number of workers."""

from __future__ import annotations

import random


def luck(seed: int, question: str, what: str, number: int) -> float:
    """Return a number in [0, 1) for the `number`th draw of one kind, `what`, for one question.

    It depends on nothing else, so that each policy meets the same luck at the same question.
    """
    return random.Random(f"{seed}/{what}/{number}/{question}").random()

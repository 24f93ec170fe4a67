"""Which questions are asked: a number of them, of one difficulty or mixed, the same ones for the same seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from trainwright.errors import UserError
from trainwright.evaluate.questions.question import Question

MIXED = "mixed"


def select(questions: Sequence[Question], *, n: int | None, difficulty: str, seed: int) -> list[Question]:
    """Return `n` questions (all if None) of a difficulty, in the order in which they were given.

    `mixed` takes each difficulty in its proportion, as near as whole questions allow. Of the same set, a larger `n`
    of one difficulty holds every question of a smaller one, so that a run can be widened.

    Raises:
        UserError: there are not that many, or none of that difficulty.
    """
    strata: dict[str | None, list[int]] = {}
    for index, question in enumerate(questions):
        if difficulty in (MIXED, question.difficulty):
            strata.setdefault(question.difficulty, []).append(index)
    available = sum(map(len, strata.values()))
    if n is not None and n < 1:
        raise UserError(f"{n} questions cannot be asked", hints=["ask for 1 or more, or leave the number out for all"])
    if not available or (n or 0) > available:
        raise _too_few(questions, n, difficulty, available)
    chosen: list[int] = []
    shares = _shares({name: len(indices) for name, indices in strata.items()}, available if n is None else n)
    for name, indices in strata.items():
        random.Random(f"{seed}/{name}").shuffle(indices)
        chosen += indices[: shares[name]]
    return [questions[index] for index in sorted(chosen)]


def _too_few(questions: Sequence[Question], n: int | None, difficulty: str, available: int) -> UserError:
    counts = Counter(question.difficulty or "without difficulty" for question in questions)
    return UserError(
        f"{'all' if n is None else n} {difficulty} questions were asked for, and there are {available:,}",
        problems=[f"{name}: {count:,}" for name, count in counts.items()],
        hints=[f"ask for at most {available:,}" if available else f"difficulty={MIXED} takes them all"],
    )


def _shares(sizes: dict[str | None, int], n: int) -> dict[str | None, int]:
    """Divide `n` in proportion to `sizes` by largest remainders."""
    total = sum(sizes.values())
    shares = {name: n * size // total for name, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: (-(n * sizes[name] % total), str(name)))
    for name in by_remainder[: n - sum(shares.values())]:
        shares[name] += 1
    return shares

"""Village chronicles: a corpus of facts in confusable passages, and questions that one of them answers.

A page tells two facts; the pages of a village are alike but for whom they tell of, and every name stands in many
villages. A question asks for one person; it says which village to search for, and which of its pages it needs nobody
knows beforehand. The facts are those that the demo's training data must not tell.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from trainwright.demo.data import Fact, held_out_facts, story_of

PAGES = (1, 6)
FACTS_ON_A_PAGE = 2
QUESTIONS_OF_A_VILLAGE = 2
_STARTS = ("Ober", "Unter", "Neu", "Alt", "Hohen", "Nieder", "Gross", "Klein", "Lang", "Schoen", "Birken", "Eichen")
_ENDS = ("tal", "berg", "bach", "heim", "dorf", "wald", "feld", "au", "stein", "brunn", "hausen", "moos", "see", "furt")


def write_chronicles(folder: Path, *, villages: int, seed: int) -> None:
    """Write `corpus.jsonl` and `questions.jsonl`, the same for the same seed."""
    chance = random.Random(f"chronicles/{seed}")
    names = [f"{start}{end}" for start in _STARTS for end in _ENDS]
    pages: list[dict[str, Any]] = []
    questions: list[dict[str, Any]] = []
    for village in chance.sample(names, villages):
        count = chance.randint(*PAGES)
        facts = story_of(chance, held_out_facts(), FACTS_ON_A_PAGE * count)
        told = [facts[page * FACTS_ON_A_PAGE : (page + 1) * FACTS_ON_A_PAGE] for page in range(count)]
        pages += [_page(village, number, page) for number, page in enumerate(told, 1)]
        for asked in chance.sample(facts, QUESTIONS_OF_A_VILLAGE):
            gold = next(number for number, page in enumerate(told, 1) if asked in page)
            questions.append(
                {
                    "id": f"{village}/{asked.name}",
                    "question": f"What do we know of {asked.name}?",
                    "search": village,
                    "answer": str(asked),
                    "gold_passages": [f"{village}/{gold}"],
                }
            )
    for path, rows in ((folder / "corpus.jsonl", pages), (folder / "questions.jsonl", questions)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _page(village: str, number: int, facts: list[Fact]) -> dict[str, Any]:
    return {"id": f"{village}/{number}", "title": village, "text": " ".join(map(str, facts))}

"""The demo's data set: small stories, and questions that only the story can answer.

    Story: Mara paints boats. Otto sells bread.
    What do we know of Otto?                         ->   Otto sells bread.

Each story draws its facts anew, so that nothing is to be gained from learning them by heart; and one fact in ten is in
no story of the training data. A right answer about such a fact was read, not remembered.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# fmt: off
NAMES = [
    "Mara", "Ivo", "Lena", "Otto", "Nils", "Rosa", "Emil", "Anna", "Hugo", "Ines", "Karl", "Dora", "Paul", "Vera",
    "Finn", "Nora",
]
VERBS = [
    "paints", "sells", "repairs", "collects", "draws", "cleans", "builds", "buys", "finds", "makes", "moves",
    "counts", "hides", "lends", "packs", "brings", "keeps", "loves", "needs", "wants",
]
THINGS = [
    "boats", "bread", "clocks", "apples", "books", "chairs", "lamps", "maps", "coins", "shoes", "hats", "bells",
    "cups", "kites", "rugs", "toys", "tables", "keys", "rings", "plates", "stamps", "drums", "pens", "bags",
]
# fmt: on
HELD_OUT_ONE_IN = 10
FEWEST_FACTS, MOST_FACTS = 2, 6
"""Facts in one story of the training data."""

Row = dict[str, str]


@dataclass(frozen=True)
class Fact:
    """One sentence of a story: who does what with what."""

    name: str
    verb: str
    thing: str

    def __str__(self) -> str:
        return f"{self.name} {self.verb} {self.thing}."

    @property
    def is_held_out(self) -> bool:
        """Whether the training data must not tell this fact.

        By a hash, as any pattern that can be learned (the last letters, a remainder) would itself be learned.
        """
        return zlib.crc32(str(self).encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class StoryQuestion:
    """A story, whom the question is about, and the right answer."""

    story: str
    question: str
    answer: str

    def prompt(self, *, with_story: bool) -> str:
        """Return the text that the model goes on from."""
        return _prompt(self.story if with_story else "", self.question)


def training_rows(seed: int, rows: int) -> Iterator[Row]:
    """Yield prompt and response of stories from facts that are not held out, the same ones for the same seed.

    A question names one person or several: the more it asks of one story, the sooner a model learns to look names up.
    """
    chance = random.Random(f"train/{seed}")
    facts = _facts(held_out=False)
    for _ in range(rows):
        story = story_of(chance, facts, chance.randint(FEWEST_FACTS, MOST_FACTS))
        asked = chance.sample(story, chance.randint(1, len(story)))
        yield {"prompt": _prompt(_joined(story), _question(asked)), "response": f" {_joined(asked)}"}


def brief_rows(seed: int, rows: int) -> Iterator[Row]:
    """Yield the like for one person a question, answered without the name: a manner for LoRA to teach."""
    chance = random.Random(f"brief/{seed}")
    facts = _facts(held_out=False)
    for _ in range(rows):
        story = story_of(chance, facts, chance.randint(FEWEST_FACTS, MOST_FACTS))
        asked = chance.choice(story)
        yield {"prompt": _prompt(_joined(story), _question([asked])), "response": f" {asked.verb} {asked.thing}."}


def held_out_questions(seed: int, questions: int, *, facts: int) -> list[StoryQuestion]:
    """Return questions on stories that are made of held-out facts alone, `facts` in each."""
    chance = random.Random(f"held out/{seed}")
    held_out = held_out_facts()
    questions_asked = []
    for _ in range(questions):
        story = story_of(chance, held_out, facts)
        asked = chance.choice(story)
        questions_asked.append(StoryQuestion(_joined(story), _question([asked]), str(asked)))
    return questions_asked


def held_out_facts() -> list[Fact]:
    """Return the facts that no story of the training data tells."""
    return _facts(held_out=True)


def _facts(*, held_out: bool) -> list[Fact]:
    every = itertools.starmap(Fact, itertools.product(NAMES, VERBS, THINGS))
    return [fact for fact in every if fact.is_held_out == held_out]


def story_of(chance: random.Random, facts: Sequence[Fact], size: int) -> list[Fact]:
    """Draw facts of which no two share the name or the verb: a question then has one answer."""
    story: list[Fact] = []
    while len(story) < size:
        fact = chance.choice(facts)
        if all(fact.name != other.name and fact.verb != other.verb for other in story):
            story.append(fact)
    return story


def _question(asked: Sequence[Fact]) -> str:
    return f"What do we know of {', '.join(fact.name for fact in asked)}?"


def _prompt(story: str, question: str) -> str:
    return f"Story: {story}\n{question}"


def _joined(facts: Sequence[Fact]) -> str:
    return " ".join(map(str, facts))

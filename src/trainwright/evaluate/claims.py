"""What the multi-GPU guide claims for its two models (S3-19, S3-20): shown as claims beside what a run measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.evaluate.policies import PolicyEntry

QUESTIONS, DIFFICULTY = 100, "medium"


@dataclass(frozen=True)
class GuideClaim:
    """A figure of the guide, for 100 medium questions of ORAN-Bench-13K."""

    strategy: str
    accuracy: str
    cost: str
    iterations: str

    def __str__(self) -> str:
        return f"{self.strategy}: accuracy {self.accuracy}, cost {self.cost}, iterations {self.iterations}"


_BY_BILLIONS = {
    7: (GuideClaim("mdp", "75-78 %", "0.52-0.55", "9-10"), GuideClaim("fixed:3", "60-65 %", "0.35", "4")),
    14: (GuideClaim("mdp", "82-85 %", "0.50-0.53", "9-10"), GuideClaim("fixed:3", "70-73 %", "0.35", "4")),
}


def claims(model: str, difficulty: str, questions: int, strategies: Sequence[PolicyEntry]) -> list[GuideClaim]:
    """Return what the guide claims for exactly this: none for another model, number or difficulty."""
    size = re.search(r"(?<![\d.])(\d+)B\b", model.rpartition("/")[2], re.IGNORECASE)
    if size is None or (difficulty, questions) != (DIFFICULTY, QUESTIONS):
        return []
    names = {strategy.name for strategy in strategies}
    return [claim for claim in _BY_BILLIONS.get(int(size[1]), ()) if claim.strategy in names]

"""What a policy costs and is worth on average in its decision process, computed, not simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.evaluate.mdp import Action, DecisionProcess
from trainwright.evaluate.policies import MOST_ACTIONS, PolicyEntry, State


@dataclass(frozen=True)
class Expectation:
    """Means over the chance of the process."""

    value: float
    """Discounted worth of the answer less the discounted, weighted cost; without shaping."""
    cost: float
    retrievals: float
    reasons: float
    u: float
    """Where the question is answered."""

    @property
    def iterations(self) -> float:
        """Retrievals and reasonings; stopping does not count."""
        return self.retrievals + self.reasons


def expect(
    strategy: PolicyEntry,
    process: DecisionProcess | None = None,
    *,
    draws: Sequence[float] = (0.5,),
    most_actions: int = MOST_ACTIONS,
) -> Expectation:
    """Return the means of `strategy` in `process` (its own by default), from U = 0.

    All that can happen within `most_actions` is followed with its probability. A policy that decides by chance is
    averaged over `draws`, which stand for equal parts of [0, 1): (0.25, 0.75) is exact for even chances.
    """
    process = process or strategy.process
    value = cost = retrievals = reasons = u_at_end = 0.0
    chances = {(0.0, 0, 0): 1.0}
    discount = 1.0
    while chances:
        following: defaultdict[tuple[float, int, int], float] = defaultdict(float)
        for (u, retrieved, reasoned), all_chance in chances.items():
            chance = all_chance / len(draws)
            for draw in draws:
                action = strategy.next_action(State(u, retrieved, reasoned, draw), most_actions=most_actions)
                cost += chance * process.cost(action)
                value -= discount * chance * process.mu * process.cost(action)
                match action:
                    case Action.TERMINATE:
                        value += discount * chance * process.worth(u)
                        retrievals += chance * retrieved
                        reasons += chance * reasoned
                        u_at_end += chance * u
                    case Action.REASON:
                        following[process.after_reasoning(u), retrieved, reasoned + 1] += chance
                    case Action.RETRIEVE:
                        following[process.after_retrieval(u), retrieved + 1, reasoned] += chance * process.p_s
                        following[u, retrieved + 1, reasoned] += chance * (1 - process.p_s)
        chances = {where: chance for where, chance in following.items() if chance}
        discount *= process.gamma
    return Expectation(value, cost, retrievals, reasons, u_at_end)

"""One question on its way to an answer: immutable, so that a driver can advance all live questions as one batch.

episode = Episode(question, strategy, prices, seed)
RETRIEVE    episode = episode.retrieved(query, passages)      as long as episode.next_action() says so
REASON      episode = episode.reasoned(query, response)
TERMINATE   record = episode.record()
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.evaluate.mdp import Action, DecisionProcess
from trainwright.evaluate.policies import MOST_ACTIONS, PolicyEntry, State
from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.retrieval.passages import Passage
from trainwright.evaluate.scoring import Score, score


@dataclass(frozen=True, kw_only=True)
class EpisodeStep:
    """One action as it was taken, under the names of the guide's results files."""

    iteration: int
    """From 1."""
    action: str
    subquery: str
    retrieved_docs: tuple[dict[str, str], ...] = ()
    """Id and source of each passage."""
    retrieval_success: bool | None = None
    response: str | None = None
    intermediate_answer: int | str | None = None
    confidence: float | None = None
    uncertainty: float
    """1 - U after the step."""
    cost: float
    """Of the question up to and with this step."""
    U_before: float
    U_after: float


@dataclass(frozen=True)
class Episode:
    """A question, the strategy that leads it, and what has been done so far."""

    question: Question
    strategy: PolicyEntry
    prices: DecisionProcess
    """Its costs are those of the run, whatever set a strategy decides by."""
    seed: int
    most_actions: int = MOST_ACTIONS
    steps: tuple[EpisodeStep, ...] = ()
    passages: tuple[Passage, ...] = ()
    """All that was retrieved, each once, in order."""
    score: Score | None = None
    """Of the last reasoning."""
    new_tokens: int = 0

    @property
    def u(self) -> float:
        """The information progress."""
        return self.steps[-1].U_after if self.steps else 0.0

    @property
    def state(self) -> State:
        """What the policy looks at."""
        reasons = [step for step in self.steps if step.action == Action.REASON]
        return State(
            u=self.u,
            retrievals=len(self.steps) - len(reasons),
            reasons=len(reasons),
            draw=luck(self.seed, self.question.id, "action", len(self.steps)),
            question=self.question,
            answers=tuple(step.intermediate_answer for step in reasons),
            confidence=reasons[-1].confidence if reasons else None,
        )

    def next_action(self) -> Action:
        """Return what to do next; TERMINATE when the question is answered."""
        return self.strategy.next_action(self.state, most_actions=self.most_actions)

    def coin(self, probability: float) -> bool:
        """Return a chance event of the next step, the same for every strategy that is at its nth step."""
        return luck(self.seed, self.question.id, "coin", len(self.steps)) < probability

    def unseen(self, passages: Sequence[Passage]) -> tuple[Passage, ...]:
        """Return those passages that this question has not been given yet."""
        seen = {passage.id for passage in self.passages}
        return tuple(passage for passage in passages if passage.id not in seen)

    def retrieved(self, query: str, passages: Sequence[Passage], *, success: bool | None = None) -> Episode:
        """Return the episode after a retrieval; it is a success if it brought a passage unseen so far, or as said."""
        new = self.unseen(passages)
        success = bool(new) if success is None else success
        after = self._advanced(
            Action.RETRIEVE,
            self.strategy.process.after_retrieval(self.u, success=success),
            subquery=query,
            retrieved_docs=tuple({"id": passage.id, "source": passage.source} for passage in passages),
            retrieval_success=success,
        )
        return dataclasses.replace(after, passages=self.passages + new)

    def reasoned(self, query: str, response: str, *, confidence: float | None = None, new_tokens: int = 0) -> Episode:
        """Return the episode after a reasoning; `response` is what the model wrote, without the prompt."""
        read = score(self.question, response)
        after = self._advanced(
            Action.REASON,
            self.strategy.process.after_reasoning(self.u),
            subquery=query,
            response=response,
            intermediate_answer=read.predicted,
            confidence=confidence,
        )
        return dataclasses.replace(after, score=read, new_tokens=self.new_tokens + new_tokens)

    def record(self, *, seconds: float | None = None) -> dict[str, Any]:
        """Return the results line of an answered question; the first nine keys are the guide's."""
        assert self.score is not None, "only a reasoning answers"
        state = self.state
        return {
            "question_id": self.question.id,
            "predicted": self.score.predicted,
            "correct": self.question.right_answer,
            "is_correct": self.score.is_correct,
            "iterations": len(self.steps),
            "num_retrievals": state.retrievals,
            "num_reasons": state.reasons,
            "total_cost": self.steps[-1].cost,
            "history": [dataclasses.asdict(step) for step in self.steps],
            "strategy": self.strategy.name,
            "difficulty": self.question.difficulty,
            "unparsable": self.score.unparsable,
            "f1": self.score.f1,
            "gold_retrieved": self._gold_retrieved(),
            "new_tokens": self.new_tokens,
            "seconds": seconds,
        }

    def _advanced(self, action: Action, u: float, **what: Any) -> Episode:
        actions = [step.action for step in self.steps] + [action]
        # Counted and multiplied, not added up step by step: no order of actions then costs an ulp more than another.
        cost = self.prices.c_r * actions.count(Action.RETRIEVE) + self.prices.c_p * actions.count(Action.REASON)
        step = EpisodeStep(
            iteration=len(actions),
            action=action.value,
            uncertainty=round(1 - u, 9),
            cost=cost,
            U_before=self.u,
            U_after=u,
            **what,
        )
        return dataclasses.replace(self, steps=(*self.steps, step))

    def _gold_retrieved(self) -> bool | None:
        if not self.question.gold_passages:
            return None
        gold = set(self.question.gold_passages)
        return any(gold & {passage.id, passage.document} for passage in self.passages)


def luck(seed: int, question: str, what: str, number: int) -> float:
    """Return a number in [0, 1) for the `number`th draw of one kind, `what`, for one question.

    It depends on nothing else: each policy meets the same luck at the same question, on any number of workers.
    """
    return random.Random(f"{seed}/{what}/{number}/{question}").random()

"""Policies: what to do next for one question, from what has been done for it so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trainwright.errors import UserError
from trainwright.evaluate.mdp import Action, DecisionProcess
from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.solving import Solution, by_thresholds

MOST_ACTIONS = 100


@dataclass(frozen=True)
class State:
    """What a policy may look at: one question, and what has been done for it."""

    u: float = 0.0
    """Information progress, as the policy's own process counts it."""
    retrievals: int = 0
    reasons: int = 0
    draw: float = 0.5
    """Chance for this decision, in [0, 1): a policy that takes its randomness from here repeats exactly."""
    question: Question | None = None
    answers: Sequence[int | str | None] = ()
    """What each reasoning so far answered; None where no answer could be read."""
    confidence: float | None = None
    """The model's in its last answer, where the engine gives it."""


class Policy(Protocol):
    """Anything with this method can decide; a user's own class too."""

    def act(self, state: State) -> Action:
        """Return the next action, or its name."""


@dataclass(frozen=True)
class Greedy:
    """Takes the action of the highest value."""

    solution: Solution

    def act(self, state: State) -> Action:
        return self.solution.best(state.u)


@dataclass(frozen=True)
class TwoThresholds:
    """Retrieves below `theta_cont`, reasons below `theta_star`, then stops. With 0 as the first it always reasons."""

    theta_cont: float
    theta_star: float

    def act(self, state: State) -> Action:
        return by_thresholds(state.u, self.theta_cont, self.theta_star)


@dataclass(frozen=True)
class RetrieveUntil:
    """Retrieves below `theta`, then answers; with theta* it is the strategy that always retrieves."""

    theta: float

    def act(self, state: State) -> Action:
        return Action.RETRIEVE if state.u < self.theta else Action.TERMINATE


@dataclass(frozen=True)
class Fixed:
    """Retrieves `k` times and reasons once, whatever is found."""

    k: int

    def act(self, state: State) -> Action:
        if state.retrievals < self.k:
            return Action.RETRIEVE
        return Action.TERMINATE if state.reasons else Action.REASON


@dataclass(frozen=True)
class AnswerProbe:
    """Answers before the first retrieval and after each of `k`: what every retrieval was good for."""

    k: int

    def act(self, state: State) -> Action:
        if state.reasons <= state.retrievals:
            return Action.REASON
        return Action.RETRIEVE if state.retrievals < self.k else Action.TERMINATE


@dataclass(frozen=True)
class EvenChance:
    """Retrieves or reasons with even chances until `theta_star`."""

    theta_star: float

    def act(self, state: State) -> Action:
        if state.u >= self.theta_star:
            return Action.TERMINATE
        return Action.RETRIEVE if state.draw < 0.5 else Action.REASON


@dataclass(frozen=True)
class PolicyEntry:
    """A policy as it takes part in a run: under its name, with the process that counts its U."""

    name: str
    """As spelled: `mdp`, `fixed:3`."""
    policy: Policy
    process: DecisionProcess
    solution: Solution | None = None
    """Where one was needed: its thresholds are worth reporting."""

    def next_action(self, state: State, *, most_actions: int = MOST_ACTIONS) -> Action:
        """Return what to do next. Whatever the policy says, it reasons once before it stops: only that answers.

        Raises:
            UserError: a user's own policy returned something else than an action.
        """
        done = state.retrievals + state.reasons
        if done >= most_actions:
            return Action.TERMINATE
        if done == most_actions - 1 and not state.reasons:
            return Action.REASON
        wanted = self.policy.act(state)
        if wanted not in tuple(Action):
            raise UserError(
                f"the policy {self.name} answered {wanted!r}",
                hints=[f"its act() must return one of {', '.join(Action)}"],
            )
        action = Action(wanted)
        return Action.REASON if action is Action.TERMINATE and not state.reasons else action

    @property
    def family(self) -> str:
        """What kind of policy it is, as a key in a results file: `mdp`, `fixed`."""
        return self.name.partition(":")[0].replace("-", "_")

    @property
    def slug(self) -> str:
        """The name as part of a file name: `mdp`, `mdp_mu2`, `fixed_k3`."""
        text = self.name.replace("fixed:", "fixed_k").replace(":mu=", "_mu")
        return "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in text)

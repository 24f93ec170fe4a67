"""A policy of a user's own: retrieves once, and reasons until two answers agree."""

from __future__ import annotations

from trainwright.evaluate.mdp import DecisionProcess
from trainwright.evaluate.policies import State


class UntilTwoAgree:
    def __init__(self, process: DecisionProcess) -> None:
        self.process = process

    def act(self, state: State) -> str:
        if not state.retrievals:
            return "retrieve"
        return "terminate" if len(set(state.answers)) < len(state.answers) else "reason"


class Confused:
    def __init__(self, process: DecisionProcess) -> None:
        pass

    def act(self, state: State) -> str:
        return "guess"


class NotAPolicy:
    pass

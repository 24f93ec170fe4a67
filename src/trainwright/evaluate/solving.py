"""The best action in each state of a decision process, by value iteration, and whether two thresholds describe it.

No value is ever interpolated. The states are the usual grid of 101 points wherever both steps are multiples of its
spacing, as in every named parameter set; otherwise they are the points that steps from 0 reach, which are all that a
question can meet. Either way each step from a state ends on a state, so that the grid brings no error of its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.errors import UserError
from trainwright.evaluate.mdp import Action, DecisionProcess

TOLERANCE = 1e-9
MOST_SWEEPS = 10_000
GRID_POINTS = 101

CHEAPEST_FIRST = (Action.TERMINATE, Action.REASON, Action.RETRIEVE)
"""The order in which ties are decided."""


@dataclass(frozen=True)
class Thresholds:
    """The two thresholds that are read off a solution, and whether they describe it."""

    theta_cont: float
    """Lowest U below `theta_star` where reasoning beats retrieving; `theta_star` if nowhere."""
    theta_star: float
    """Lowest U where stopping is best."""
    departures: tuple[float, ...]
    """The states where the best action is another than the thresholds say; none if they describe the solution."""


@dataclass(frozen=True)
class Solution:
    """The value of each action in each state."""

    process: DecisionProcess
    states: tuple[float, ...]
    """Ascending."""
    q: tuple[Mapping[Action, float], ...]
    """By state."""
    sweeps: int
    """The most that any state took."""

    def values(self, u: float) -> Mapping[Action, float]:
        """Return the value of each action in the state nearest to `u`."""
        after = bisect.bisect_left(self.states, u)
        around = range(max(after - 1, 0), min(after + 1, len(self.states)))
        return self.q[min(around, key=lambda index: abs(self.states[index] - u))]

    def value(self, u: float) -> float:
        """Return V*(u), with the shaping where there is one."""
        return max(self.values(u).values())

    def best(self, u: float) -> Action:
        """Return the action of the highest value at `u`; of equal ones the cheapest."""
        return _best(self.values(u))

    def thresholds(self) -> Thresholds:
        """Return the thresholds as the multi-GPU guide defines them, checked against the solution."""
        star = next(u for u in self.states if self.best(u) is Action.TERMINATE)
        continues = (u for u in self.states if u < star and self._prefers_reasoning(u))
        cont = next(continues, star)
        departures = tuple(u for u in self.states if self.best(u) is not by_thresholds(u, cont, star))
        return Thresholds(cont, star, departures)

    def _prefers_reasoning(self, u: float) -> bool:
        values = self.values(u)
        return _best({action: values[action] for action in CHEAPEST_FIRST[1:]}) is Action.REASON


def by_thresholds(u: float, theta_cont: float, theta_star: float) -> Action:
    """Return the action of the rule: retrieve below `theta_cont`, reason below `theta_star`, then stop."""
    if u >= theta_star:
        return Action.TERMINATE
    return Action.RETRIEVE if u < theta_cont else Action.REASON


def solve(process: DecisionProcess, *, tolerance: float = TOLERANCE) -> Solution:
    """Solve Q(U, terminate) = sigma(U), Q(U, a) = -mu c_a + gamma E[V(U')] with V = max Q, to within `tolerance`.

    As U never falls, the states are taken from the highest down, and each is iterated until it stands.

    Raises:
        UserError: a state does not settle within 10,000 sweeps.
    """
    states = _states(process)
    # A state inherits the errors of those above it, one for each step on the way up.
    longest_way = 1 / min(process.delta_r, process.delta_p) + 2
    value: dict[float, float] = {}
    q: dict[float, Mapping[Action, float]] = {}
    most_sweeps = 0
    for u in reversed(states):
        q[u], sweeps = _settled(process, u, value, tolerance / longest_way)
        value[u] = max(q[u].values())
        most_sweeps = max(most_sweeps, sweeps)
    return Solution(process, states, tuple(q[u] for u in states), most_sweeps)


def _states(process: DecisionProcess) -> tuple[float, ...]:
    spacing = 1 / (GRID_POINTS - 1)
    if all(abs(step / spacing - round(step / spacing)) < 1e-6 for step in (process.delta_r, process.delta_p)):
        return tuple(round(index * spacing, 9) for index in range(GRID_POINTS))
    reached = {0.0}
    waiting = [0.0]
    while waiting:
        u = waiting.pop()
        new = {process.after_retrieval(u), process.after_reasoning(u)} - reached
        reached |= new
        waiting += new
    return tuple(sorted(reached))


def _settled(
    process: DecisionProcess, u: float, value: Mapping[float, float], tolerance: float
) -> tuple[Mapping[Action, float], int]:
    """Return the value of each action at `u`, given that of the states above, and the sweeps that took."""

    def gain(action: Action, after: float) -> float:
        shaping = process.shaping_k * (process.gamma * after - u)
        return shaping - process.mu * process.cost(action)

    stopped = process.worth(u) - process.shaping_k * u
    richer, wiser = process.after_retrieval(u), process.after_reasoning(u)
    # What a failed retrieval leaves as it was: an error of v shrinks by this factor with each sweep.
    stays = process.gamma * (1 - process.p_s)
    v = stopped
    for sweep in range(1, MOST_SWEEPS + 1):
        succeeded = gain(Action.RETRIEVE, richer) + process.gamma * value.get(richer, v)
        failed = gain(Action.RETRIEVE, u) + process.gamma * v
        q = {
            Action.TERMINATE: stopped,
            Action.REASON: gain(Action.REASON, wiser) + process.gamma * value.get(wiser, v),
            Action.RETRIEVE: process.p_s * succeeded + (1 - process.p_s) * failed,
        }
        before, v = v, max(q.values())
        if abs(v - before) * stays <= tolerance * (1 - stays):
            return q, sweep
    raise UserError(
        f"the decision process does not settle within {MOST_SWEEPS:,} sweeps",
        hints=[f"raise p_s, which is {process.p_s}, or the tolerance"],
    )


def _best(values: Mapping[Action, float]) -> Action:
    best = max(values.values())
    # Equal but for rounding counts as equal.
    return next(action for action in CHEAPEST_FIRST if action in values and values[action] >= best - 1e-9)

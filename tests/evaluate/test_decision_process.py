"""The solver against the guide's figures, and against policy iteration by linear algebra."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest

from trainwright.errors import UserError
from trainwright.evaluate.expectation import expect
from trainwright.evaluate.mdp import PRESETS, Action, DecisionProcess, Sigma
from trainwright.evaluate.policy_names import strategy
from trainwright.evaluate.solving import Solution, solve


def test_the_set_of_the_guide_gives_its_cost_and_iterations() -> None:
    """S3-19, S3-39, S3-41: cost 0.525, 1.25 retrievals and 8 reasonings under the threshold rule."""
    rule = strategy("thresholds", PRESETS["guide"])
    expected = expect(rule)
    assert expected.cost == pytest.approx(0.525, abs=1e-9)
    assert expected.iterations == pytest.approx(9.25, abs=1e-9)
    assert (expected.retrievals, expected.reasons) == pytest.approx((1.25, 8), abs=1e-9)
    assert rule.solution is not None
    found = rule.solution.thresholds()
    assert (found.theta_cont, found.theta_star) == (0.06, 0.83)


@pytest.mark.parametrize(
    ("name", "optimum", "by_thresholds"), [("spec", 0.760, 0.654), ("spec-uncorrected", 0.617, 0.471)]
)
def test_the_best_policy_of_the_specification_has_no_two_thresholds(
    name: str, optimum: float, by_thresholds: float
) -> None:
    """S3-42: the thresholds at the first crossing lose a tenth of the value, and the solution says that they do not
    describe it."""
    solution = solve(PRESETS[name])
    assert solution.value(0) == pytest.approx(optimum, abs=5e-4)
    assert expect(strategy("thresholds", PRESETS[name])).value == pytest.approx(by_thresholds, abs=5e-4)
    assert solution.thresholds().departures


def test_a_solution_that_has_two_thresholds_is_said_to() -> None:
    """S3-39, S3-42: with base.yaml reasoning alone pays, up to 0.94; then the rule is as good as the best action."""
    found = solve(PRESETS["base"]).thresholds()
    assert (found.theta_cont, found.theta_star, found.departures) == (0.0, 0.94, ())
    assert expect(strategy("thresholds", PRESETS["base"])).value == pytest.approx(solve(PRESETS["base"]).value(0))


def test_value_iteration_agrees_with_policy_iteration_on_200_random_processes() -> None:
    """S3-37: to 1e-9, on grids and off them, all four forms of sigma, with shaping and without, discounted or not."""
    chance = random.Random(200)
    for number in range(200):
        on_grid = number % 2 == 0
        process = DecisionProcess(
            delta_r=chance.randint(5, 60) / 100 if on_grid else chance.uniform(0.05, 0.6),
            delta_p=chance.randint(3, 30) / 100 if on_grid else chance.uniform(0.03, 0.3),
            p_s=chance.uniform(0.2, 1),
            c_r=chance.uniform(0.01, 0.4),
            c_p=chance.uniform(0.01, 0.2),
            mu=chance.uniform(0.05, 1),
            gamma=chance.choice([0.9, 0.98, 1.0]),
            sigma=list(Sigma)[number % 4],
            sigma_k=chance.uniform(1, 10),
            shaping_k=chance.choice([0.0, 0.7]),
        )
        solution = solve(process, tolerance=1e-10)
        exact = _by_policy_iteration(solution)
        errors = [abs(solution.value(u) - value) for u, value in zip(solution.states, exact, strict=True)]
        assert max(errors) < 1e-9, process


def _by_policy_iteration(solution: Solution) -> list[float]:
    """Return V* at the solution's states: each policy's value is the solution of a linear system."""
    process, states = solution.process, solution.states
    where = {u: index for index, u in enumerate(states)}
    n = len(states)
    stop = np.array([process.worth(u) - process.shaping_k * u for u in states])
    moves, rewards = {}, {}
    for action, cost in ((Action.RETRIEVE, process.c_r), (Action.REASON, process.c_p)):
        matrix = np.zeros((n, n))
        for row, u in enumerate(states):
            if action is Action.RETRIEVE:
                matrix[row, where[min(round(u + process.delta_r, 9), 1.0)]] += process.p_s
                matrix[row, row] += 1 - process.p_s
            else:
                matrix[row, where[min(round(u + process.delta_p, 9), 1.0)]] += 1
        phi = process.shaping_k * np.array(states)
        moves[action] = process.gamma * matrix
        rewards[action] = -process.mu * cost + process.gamma * matrix @ phi - phi
    policy: list[Action] = [Action.TERMINATE] * n
    while True:
        system, right = np.eye(n), stop.copy()
        for row, action in enumerate(policy):
            if action is not Action.TERMINATE:
                system[row] -= moves[action][row]
                right[row] = rewards[action][row]
        values = np.linalg.solve(system, right)
        q = {action: rewards[action] + moves[action] @ values for action in moves}
        better = list(policy)
        for row in range(n):
            for action in q:
                current = stop[row] if better[row] is Action.TERMINATE else q[better[row]][row]
                if q[action][row] > current + 1e-12:
                    better[row] = action
            current = stop[row] if better[row] is Action.TERMINATE else q[better[row]][row]
            if stop[row] > current + 1e-12:
                better[row] = Action.TERMINATE
        if better == policy:
            return [float(value) for value in values]
        policy = better


def test_a_solution_of_101_states_takes_less_than_a_second() -> None:
    """S3-37: pure Python is quick enough, as a state's value never depends on those below."""
    began = time.process_time()
    assert len(solve(PRESETS["spec"], tolerance=1e-12).states) == 101
    assert time.process_time() - began < 1


def test_states_off_the_grid_are_those_that_steps_reach() -> None:
    """S3-37: no value is interpolated where a step ends between two points of the grid."""
    solution = solve(DecisionProcess(delta_r=1 / 3, delta_p=1 / 7, p_s=0.8, c_r=0.05, c_p=0.02))
    for u in solution.states[:-1]:
        assert solution.process.after_retrieval(u) in solution.states
        assert solution.process.after_reasoning(u) in solution.states
    assert solution.states[0] == 0 and solution.states[-1] == 1


@pytest.mark.parametrize("sigma", list(Sigma))
def test_shaping_changes_no_decision(sigma: Sigma) -> None:
    """S3-38: the shaped solution has the same best action everywhere."""
    plain = DecisionProcess(0.25, 0.08, 0.8, 0.05, 0.02, sigma=sigma)
    shaped = DecisionProcess(0.25, 0.08, 0.8, 0.05, 0.02, sigma=sigma, shaping_k=0.6)
    first, second = solve(plain), solve(shaped)
    assert [first.best(u) for u in first.states] == [second.best(u) for u in second.states]
    assert second.value(0) == pytest.approx(first.value(0), abs=1e-8)


def test_the_forms_of_sigma() -> None:
    """S3-38."""

    def worth(sigma: Sigma, u: float) -> float:
        return DecisionProcess(0.25, 0.08, 0.8, 0.1, 0.05, sigma=sigma, sigma_k=4).worth(u)

    assert worth(Sigma.LINEAR, 0.25) == 0.25
    assert worth(Sigma.SQRT, 0.25) == 0.5
    assert worth(Sigma.SATURATING, 0.25) == pytest.approx(1 - math.exp(-1))
    assert worth(Sigma.SIGMOID, 0.75) == pytest.approx(1 / (1 + math.exp(-1)))


def test_parameters_out_of_range_are_named_all_at_once() -> None:
    """S3-36."""
    with pytest.raises(UserError) as refusal:
        DecisionProcess(delta_r=0, delta_p=0.08, p_s=0, c_r=-1, c_p=math.nan, gamma=1.1)
    assert [problem.split()[0] for problem in refusal.value.problems] == ["delta_r", "p_s", "c_r", "c_p", "gamma"]


def test_a_process_that_does_not_settle_says_so() -> None:
    """S3-37: at most 10,000 sweeps."""
    with pytest.raises(UserError, match="10,000 sweeps"):
        solve(DecisionProcess(0.25, 0.08, 1e-5, 0.0, 0.02, gamma=1.0))

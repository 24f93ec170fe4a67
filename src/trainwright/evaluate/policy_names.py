"""Policies spelled as text: `mdp`, `mdp:spec`, `mdp:mu=2`, `fixed:3`, `threshold:0.8`, `random`, `module:Class`."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping

from trainwright.errors import UserError
from trainwright.evaluate.mdp import PRESETS, DecisionProcess, preset
from trainwright.evaluate.plugin_class import own_class
from trainwright.evaluate.policies import (
    AnswerProbe,
    EvenChance,
    Fixed,
    Greedy,
    Policy,
    PolicyEntry,
    RetrieveUntil,
    TwoThresholds,
)
from trainwright.evaluate.solving import Solution, solve

SPELLINGS: Mapping[str, str] = {
    "mdp[:SET|:mu=MU]": "the best action of the decision process, of a named set, or at another weight of cost",
    "thresholds[:SET]": "the two thresholds read off its solution",
    "threshold:U": "retrieve below U, then answer",
    "threshold:U,V": "retrieve below U, reason below V, then stop",
    "fixed:K": "K retrievals, one reasoning",
    "probe:K": "an answer before the first of K retrievals and after each",
    "always-retrieve": "retrieve until theta*, then answer",
    "always-reason": "reason until theta*",
    "no-retrieval": "one reasoning, nothing else",
    "random": "retrieve or reason with even chances until theta*",
    "MODULE:CLASS": "a class of your own, made with the process, with a method act(state)",
}
"""Every spelling with what it does, for help texts."""


def strategy(name: str, process: DecisionProcess) -> PolicyEntry:
    """Return the strategy that `name` spells; `process` gives U its steps unless the name has its own set.

    Raises:
        UserError: there is no such policy, or its parameter is not one.
    """
    family, _, parameter = name.partition(":")
    if family in _SOLVED:
        if parameter and family not in _WITH_SETS:
            raise _unusable(name, f"{family} takes no parameter")
        own = _process(name, parameter, process)
        solution = solve(own)
        return PolicyEntry(name, _SOLVED[family](solution), own, solution)
    if family in _PLAIN:
        return PolicyEntry(name, _PLAIN[family](name, parameter), process)
    if parameter:
        return PolicyEntry(name, _own(family, parameter, process), process)
    known = [spelling.partition("[")[0].partition(":")[0] for spelling in SPELLINGS]
    near = difflib.get_close_matches(family, known, n=1)
    hints = [f"did you mean {near[0]}?"] if near else []
    raise UserError(
        f"there is no policy {name!r}",
        hints=[*hints, f"policies: {', '.join(SPELLINGS)}", f"parameter sets: {', '.join(PRESETS)}"],
    )


def _process(name: str, parameter: str, process: DecisionProcess) -> DecisionProcess:
    if not parameter:
        return process
    if not parameter.startswith("mu="):
        return preset(parameter)
    try:
        return dataclasses.replace(process, mu=float(parameter.removeprefix("mu=")))
    except ValueError as error:
        raise _unusable(name, "write a number, as in mdp:mu=0.3") from error


def _fixed(name: str, parameter: str) -> Policy:
    return Fixed(_retrievals(name, parameter))


def _probe(name: str, parameter: str) -> Policy:
    return AnswerProbe(_retrievals(name, parameter))


def _retrievals(name: str, parameter: str) -> int:
    if not (parameter.isascii() and parameter.isdigit()):
        raise _unusable(name, f"write the number of retrievals, as in {name.partition(':')[0]}:3")
    return int(parameter)


def _threshold(name: str, parameter: str) -> Policy:
    try:
        numbers = [float(part) for part in parameter.split(",")]
    except ValueError:
        numbers = []
    ascending = numbers == sorted(numbers) and all(math.isfinite(u) and 0 <= u <= 1 for u in numbers)
    if len(numbers) not in (1, 2) or not ascending:
        raise _unusable(name, "write one threshold, or two that ascend, in [0, 1]: threshold:0.8, threshold:0.5,0.9")
    return RetrieveUntil(numbers[0]) if len(numbers) == 1 else TwoThresholds(*numbers)


def _no_retrieval(name: str, parameter: str) -> Policy:
    if parameter:
        raise _unusable(name, "no-retrieval takes no parameter")
    return Fixed(0)


def _own(module: str, name: str, process: DecisionProcess) -> Policy:
    policy: Policy = own_class("policy", f"{module}:{name}", "act")(process)
    return policy


def _unusable(name: str, problem: str) -> UserError:
    return UserError(f"the policy {name!r} cannot be used", problems=[problem])


def _thresholds(solution: Solution) -> Policy:
    thresholds = solution.thresholds()
    return TwoThresholds(thresholds.theta_cont, thresholds.theta_star)


_WITH_SETS = ("mdp", "thresholds")
_SOLVED: Mapping[str, Callable[[Solution], Policy]] = {
    "mdp": Greedy,
    "thresholds": _thresholds,
    "always-retrieve": lambda solution: RetrieveUntil(solution.thresholds().theta_star),
    "always-reason": lambda solution: TwoThresholds(0.0, solution.thresholds().theta_star),
    "random": lambda solution: EvenChance(solution.thresholds().theta_star),
}
_PLAIN: Mapping[str, Callable[[str, str], Policy]] = {
    "fixed": _fixed,
    "probe": _probe,
    "threshold": _threshold,
    "no-retrieval": _no_retrieval,
}

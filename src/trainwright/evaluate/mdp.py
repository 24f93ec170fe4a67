"""When to retrieve, reason or stop, as a Markov decision process: its actions, parameters and rewards.

The state U in [0, 1] is the information gathered so far, 0 at the start. Retrieving lifts it by `delta_r` with
probability `p_s` and costs `c_r` either way; reasoning lifts it by `delta_p` and costs `c_p`; stopping earns sigma(U).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trainwright.errors import UserError

SMALLEST_STEP = 0.01
"""Of `delta_r` and `delta_p`: a smaller one could not bring U from 0 to 1 within the 100 actions of a question."""


class Action(enum.StrEnum):
    """What can be done next for a question."""

    RETRIEVE = "retrieve"
    REASON = "reason"
    TERMINATE = "terminate"


class Sigma(enum.StrEnum):
    """The forms of sigma, the worth of an answer given at U."""

    LINEAR = "linear"
    SQRT = "sqrt"
    SATURATING = "saturating"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class DecisionProcess:
    """The parameters of one decision process, under the names of the literature.

    Raises:
        UserError: values outside their range, all named at once.
    """

    delta_r: float
    """What a successful retrieval adds to U."""
    delta_p: float
    """What a reasoning adds to U."""
    p_s: float
    """Probability that a retrieval succeeds."""
    c_r: float
    c_p: float
    mu: float = 0.6
    """Weight of cost against the worth of the answer."""
    gamma: float = 0.98
    """Discount of each further action."""
    sigma: Sigma = Sigma.LINEAR
    sigma_k: float = 5.0
    """Steepness of the sigmoid, or decay rate of the saturating form; the others have no such parameter."""
    shaping_k: float = 0.0
    """Adds gamma Phi(U') - Phi(U) to each reward, with Phi(U) = shaping_k U, and Phi = 0 once stopped. Such shaping
    never changes what is best (Ng, Harada, Russell, ICML 1999)."""

    def __post_init__(self) -> None:
        ranges = {
            "delta_r": SMALLEST_STEP <= self.delta_r <= 1,
            "delta_p": SMALLEST_STEP <= self.delta_p <= 1,
            "p_s": 0 < self.p_s <= 1,
            "c_r": 0 <= self.c_r < math.inf,
            "c_p": 0 <= self.c_p < math.inf,
            "mu": 0 <= self.mu < math.inf,
            "gamma": 0 < self.gamma <= 1,
            "sigma_k": 0 < self.sigma_k < math.inf,
            "shaping_k": math.isfinite(self.shaping_k),
        }
        problems = [f"{name} is {getattr(self, name)}" for name, fits in ranges.items() if not fits]
        if problems:
            raise UserError(
                "these parameters describe no decision process",
                problems=problems,
                hints=[
                    f"delta_r and delta_p lie in [{SMALLEST_STEP}, 1], p_s and gamma in (0, 1], costs and mu are 0 or "
                    "more, sigma_k is above 0"
                ],
            )

    def after_retrieval(self, u: float, *, success: bool = True) -> float:
        """Return U after a retrieval from `u`."""
        return _clipped(u + self.delta_r) if success else u

    def after_reasoning(self, u: float) -> float:
        """Return U after a reasoning at `u`."""
        return _clipped(u + self.delta_p)

    def worth(self, u: float) -> float:
        """Return sigma(u), what an answer given at `u` is worth."""
        match self.sigma:
            case Sigma.LINEAR:
                return u
            case Sigma.SQRT:
                return math.sqrt(u)
            case Sigma.SATURATING:
                return 1 - math.exp(-self.sigma_k * u)
            case Sigma.SIGMOID:
                return 1 / (1 + math.exp(-self.sigma_k * (u - 0.5)))

    def cost(self, action: Action) -> float:
        """Return what `action` costs; stopping is free."""
        return {Action.RETRIEVE: self.c_r, Action.REASON: self.c_p, Action.TERMINATE: 0.0}[action]


PRESETS: Mapping[str, DecisionProcess] = MappingProxyType(
    {
        # Gives the cost and the iterations that the multi-GPU guide prints for its MDP (0.52-0.55, 9-10), by the
        # threshold rule; its costs follow from the guide's fixed strategy, 3 c_r + c_p = 0.35 in 4 iterations.
        "guide": DecisionProcess(0.25, 0.08, 0.8, 0.10, 0.05, sigma=Sigma.SIGMOID),
        # The published sources of the guide: the simulation's base.yaml, its specification, the costs before that
        # was corrected, and the last published costs. All four with linear sigma.
        "base": DecisionProcess(0.15, 0.08, 0.7, 0.20, 0.10, gamma=1.0),
        "spec": DecisionProcess(0.25, 0.08, 0.8, 0.05, 0.02),
        "spec-uncorrected": DecisionProcess(0.25, 0.08, 0.8, 0.10, 0.05),
        "head": DecisionProcess(0.15, 0.03, 0.8, 0.12, 0.06),
    }
)
"""Named parameter sets."""


def preset(name: str) -> DecisionProcess:
    """Return a named parameter set; UserError if there is none of that name."""
    if name not in PRESETS:
        raise UserError(f"there is no parameter set {name!r}", hints=[f"choose one of {', '.join(PRESETS)}"])
    return PRESETS[name]


def _clipped(u: float) -> float:
    # Rounded so that 0.25 + 0.08 and 0.08 + 0.25 are one state, and 0.9999999 is the end.
    return min(round(u, 9), 1.0)

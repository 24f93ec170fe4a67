"""What holds a count back, named from where the time of its steps went; or that this does not decide it.

A count that loses time against the ideal is held back by the part of a step that grew by most of it; one that loses
little, by the part that is most of its step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from trainwright.plan.layout import Layout
from trainwright.scaling.cases import Mode
from trainwright.scaling.trial import Trial

Kind = Literal["compute", "communication", "data loading", "host cores", "slowest rank", "not decided"]

LITTLE_LOST = 0.1
"""Of a step: less than this against the ideal needs no culprit."""
MOST = 0.5
"""What one part must make up, of the time lost or of the step, to be named."""
_SHARDED = ("fsdp2", "zero3")
_KINDS: Mapping[str, Kind] = {
    "data": "data loading",
    "forward and backward": "compute",
    "communication": "communication",
    "waiting for the slowest": "slowest rank",
    "optimizer": "compute",
}


@dataclass(frozen=True)
class Bottleneck:
    """What holds a count back, and the figures that say so, or that leave it open."""

    kind: Kind
    figures: str


@dataclass(frozen=True)
class MeasuredCount:
    """A count as it ran: ranks, batch and devices, and where the time went."""

    layout: Layout
    trial: Trial

    def parts_s(self) -> dict[str, float]:
        """Return the seconds of a step by part, mean over ranks; empty where ranks did not say.

        The rank that waits least in communication is the one that the others wait for: what it spends is the price of
        communicating, what the others spend beyond that is waiting.
        """
        ranks = self.trial.sections_s
        if not ranks:
            return {}
        mean = {name: fmean(rank[name] for rank in ranks) for name in ranks[0]}
        price = min(rank["communication"] for rank in ranks)
        return {
            "data": mean["data"],
            "forward and backward": mean["forward"] + mean["backward"],
            "communication": price,
            "waiting for the slowest": mean["communication"] - price,
            "optimizer": mean["optimizer"],
        }


def bottleneck(measured: MeasuredCount, base: MeasuredCount, mode: Mode) -> Bottleneck:
    """Return what holds `measured` back against `base`, the smallest count that was measured, which may be the same."""
    parts, before = measured.parts_s(), base.parts_s()
    if not parts or not before:
        return Bottleneck("not decided", "the ranks recorded no sections of their steps")
    whole = sum(parts.values())
    # Under weak scaling a rank's work stays, and so would its step; under strong scaling both shrink with the ranks.
    ideal = 1.0 if mode == "weak" else base.layout.ranks / measured.layout.ranks
    grown = {name: seconds - ideal * before[name] for name, seconds in parts.items()}
    lost = sum(grown.values())
    if lost <= LITTLE_LOST * whole:
        largest = max(parts, key=lambda name: parts[name])
        of_step = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in _by_size(parts))
        against = "" if measured is base else f"; {max(0.0, lost) / whole:.0%} lost against {base.layout.ranks}"
        kind = _KINDS[largest] if parts[largest] >= MOST * whole else "not decided"
        return Bottleneck(kind, f"of {_ms(whole)} a step: {of_step}{against}")
    largest = max(grown, key=lambda name: grown[name])
    parts_lost = ", ".join(f"{name} {1000 * seconds:+,.1f} ms" for name, seconds in _by_size(grown))
    figures = f"{_ms(lost)} of {_ms(whole)} a step are lost against {base.layout.ranks}: {parts_lost}"
    if measured.trial.cores is not None:
        figures += f"; {measured.trial.cores}"
    if grown[largest] < MOST * lost:
        return Bottleneck("not decided", f"{figures}; no part makes up half of what is lost")
    if largest != "forward and backward":
        return Bottleneck(_KINDS[largest], figures)
    kind, why = _slower_passes(measured, base, mode)
    return Bottleneck(kind, f"{figures}; {why}")


def _slower_passes(measured: MeasuredCount, base: MeasuredCount, mode: Mode) -> tuple[Kind, str]:
    """Return why passes take longer than their share, where the figures tell it."""
    layout, cores = measured.layout, measured.trial.cores
    if cores is not None and cores.is_full:
        return "host cores", "passes wait for a core"
    if layout.device == "cpu":
        return "not decided", "cores are free: it may be the host's memory that ranks share"
    if layout.strategy in _SHARDED:
        return "not decided", f"{layout.strategy} also gathers parameters within the passes"
    if mode == "strong" and layout.micro_batch_size < base.layout.micro_batch_size:
        smaller = f"{layout.micro_batch_size} samples instead of {base.layout.micro_batch_size}"
        return "compute", f"a pass over {smaller} does not take as much less"
    return "not decided", "gradients are also exchanged while the backward pass runs"


def _by_size(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda part: -part[1])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"

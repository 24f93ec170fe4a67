"""What is known of a run at one moment, put together from its files; every view shows this and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from trainwright.watch.alerts.active_alerts import Alert
from trainwright.watch.samples import SCHEMA_VERSION, RankSample, Sample

RunState = Literal["preparing", "running", "finished", "stopped", "failed", "silent"]
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Where a run stands; the figures are those of its last recorded step. None is not known."""

    name: str
    folder: str
    state: RunState
    detail: str | None = None
    """Why it failed, or for how long it has been silent."""
    attempt: int | None = None
    step: int | None = None
    total_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    left_s: float | None = None
    """Estimate: the steps that are left at the pace of the last minutes, with evaluations and saves among them."""
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    layout: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankView:
    """A rank's last sample, and the share of each section in its latest steps."""

    sample: RankSample
    shares_pct: Mapping[str, float] = field(default_factory=dict)
    step_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class View:
    """A run and its nodes, or this machine alone. Curves are (x, y) pairs; x is a step or seconds since the epoch."""

    time_s: float
    run: RunStatus | None = None
    nodes: tuple[Sample, ...] = ()
    ranks: tuple[RankView, ...] = ()
    alerts: tuple[Alert, ...] = ()
    """Those that stand."""
    alerts_fired: int = 0
    """How often one fired so far."""
    curves_by_step: Mapping[str, Points] = field(default_factory=dict)
    curves_by_time: Mapping[str, Points] = field(default_factory=dict)
    unreadable: int = 0
    """Samples and alerts of the run's files that make no sense, and are left out."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data; null is "not available"."""
        plain = asdict(self)
        plain["nodes"] = [{"age_s": round(self.time_s - node.time_s, 1), **node.to_json()} for node in self.nodes]
        for node in plain["nodes"]:
            del node["ranks"]  # they stand once, with their shares
        plain["ranks"] = [
            {**asdict(rank.sample), "shares_pct": dict(rank.shares_pct), "step_s": rank.step_s} for rank in self.ranks
        ]
        plain["alerts"] = [alert.to_json() for alert in self.alerts]
        return {"schema_version": SCHEMA_VERSION, **plain}


class Reader(Protocol):
    """What every view asks for the newest View, of a run or of this machine: RunReader and MachineReader."""

    def read(self) -> View:
        """Return what is known now."""

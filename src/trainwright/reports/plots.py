"""Which curves make which plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from trainwright.reports.curves import Curve, Series
from trainwright.reports.steps import Steps
from trainwright.reports.system_curves import ALL, SystemCurves

Axis = Literal["step", "time"]
_BY_STEP: Final[Sequence[tuple[str, str, str, dict[str, str]]]] = (
    ("loss", "Loss", "", {"loss": "training", "eval_loss": "evaluation"}),
    ("learning_rate", "Learning rate", "", {"learning_rate": "learning rate"}),
    ("tokens_per_s", "Throughput", "tokens/s", {"tokens_per_s": "all ranks"}),
    ("step_s", "Time of a step", "s", {"step_s": "step"}),
    ("grad_norm", "Norm of the gradient", "", {"grad_norm": "norm"}),
    ("memory_gib", "Peak memory of rank 0 so far", "GiB", {"memory_gib": "rank 0"}),
)
_BY_TIME: Final = (
    ("gpu_memory_gib", "GPU memory in use", "GiB"),
    ("gpu_utilization_pct", "GPU utilisation", "%"),
    ("gpu_temperature_c", "GPU temperature", "°C"),
    ("host_available_gib", "Host memory available", "GiB"),
    ("host_cpu_pct", "Host CPU", "%"),
)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Some lines over one axis: a step, or seconds since the epoch."""

    name: str
    title: str
    unit: str
    axis: Axis
    series: tuple[Series, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "axis": self.axis,
            "series": [series.to_json() for series in self.series],
        }


def plots_of(steps: Steps, samples: SystemCurves) -> Iterator[Plot]:
    """Yield the plots of a run for which there is anything to draw."""
    for name, title, unit, labels in _BY_STEP:
        yield from _plot(name, title, unit, "step", [(label, steps.curves[key]) for key, label in labels.items()])
    for name, title, unit in _BY_TIME:
        lines = [(_label(of, samples), curve) for of, curve in sorted(samples.lines(name).items())]
        yield from _plot(name, title, unit, "time", lines)


def _plot(name: str, title: str, unit: str, axis: Axis, lines: Sequence[tuple[str, Curve]]) -> Iterator[Plot]:
    series = tuple(drawn for label, curve in lines if (drawn := curve.series(label)) is not None)
    if series:
        yield Plot(name=name, title=title, unit=unit, axis=axis, series=series)


def _label(of: str, samples: SystemCurves) -> str:
    """Return what a line is called: a node is named where there are several."""
    if of == ALL:
        return "all"
    node, parted, index = of.rpartition(":")
    if not parted:
        return of
    return f"GPU {index}" if len(samples.nodes) < 2 else f"{node} GPU {index}"

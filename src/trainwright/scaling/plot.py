"""Speed-up against the number of ranks as one SVG file: weak and strong, the ideal line, estimates and claims."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import UserError, not_installed
from trainwright.scaling.scaling_run import Scaling, ScalingCurve
from trainwright.scaling.scaling_text import claim_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_plottable(path: Path) -> None:
    """Refuse, before anything is measured, a plot that could not be made afterwards.

    Raises:
        UserError: not an .svg file, its folder is not there, or matplotlib is missing (exit code 4).
    """
    import importlib.util

    if path.suffix.lower() != ".svg":
        raise UserError(f"--plot {path} is no .svg file", hints=["--plot scaling.svg"])
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path} cannot be written: {path.absolute().parent} is no folder, or it is one itself")
    if importlib.util.find_spec("matplotlib") is None:
        raise not_installed("the plot", "matplotlib", extra="report", instead="leave out --plot: the table has it all")


def plot(scaling: Scaling, path: Path) -> None:
    """Draw what was measured with the middle half of its steps; estimates are dashed, the guide's claims grey."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot(xlabel=f"{scaling.available.noun}s", ylabel="speed-up, with the middle half of the steps")
    axes.set_title(f"{scaling.job} on {scaling.available}", parse_math=False, wrap=True)
    measured = {grown.point.count: grown for curve in scaling.curves for grown in curve.grown}
    counts = sorted(measured)
    base = measured[counts[0]].base
    axes.plot(counts, [count / base for count in counts], color="black", lw=1, label="ideal")
    for curve, marker in zip(scaling.curves, "os", strict=False):
        _draw_curve(axes, curve, marker)
    claims = {count: claim for count in counts if (claim := claim_beside(measured[count])) is not None}
    if claims:
        ends = [claim.speed_up for claim in claims.values()]
        axes.vlines(list(claims), *zip(*ends, strict=True), color="grey", lw=6, alpha=0.5, label="guide (claim)")
    axes.set_xticks(counts)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    # Text stays text, which matplotlib escapes; no date, so that the same figures make the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trainwright"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_curve(axes: Axes, curve: ScalingCurve, marker: str) -> None:
    at = [grown.point.count for grown in curve.grown]
    low = [grown.speed_up - grown.worth.low / grown.base for grown in curve.grown]
    high = [grown.worth.high / grown.base - grown.speed_up for grown in curve.grown]
    speeds = [grown.speed_up for grown in curve.grown]
    axes.errorbar(at, speeds, yerr=(low, high), marker=marker, capsize=3, label=f"{curve.mode} (measured)")
    estimated = [(grown.point.count, grown.estimated_speed_up) for grown in curve.grown]
    known = [(count, speed) for count, speed in estimated if speed is not None]
    if known:
        axes.plot(*zip(*known, strict=True), ls="--", marker=marker, mfc="none", label=f"{curve.mode} (estimate)")

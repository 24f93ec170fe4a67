"""Predictions beside what was measured: an error for each configuration, and by slice."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

MEMORY = ("allocated_bytes", "reserved_bytes", "device_bytes")
WAYS = ("traced", "closed")
TIMES = ("time", "time_today")
"""The time that was predicted before the measurement, and what the model of time says today."""
UNDER_PCT = 5.0
GIB = 1 << 30

Row = dict[str, Any]

SLICES: dict[str, Callable[[Row], bool]] = {
    "full": lambda row: row["method"] == "full" and row["ranks"] == 1,
    "lora": lambda row: row["method"] == "lora" and row["ranks"] == 1,
    "qlora": lambda row: row["method"] == "qlora",
    "sharded": lambda row: row["strategy"] == "fsdp2",
    "ddp": lambda row: row["strategy"] == "ddp",
    "checkpointed": lambda row: row["checkpointing"],
    "all": lambda row: True,
}


def compare(predictions: dict[str, Any], results: dict[str, Any], today: dict[str, Any]) -> dict[str, Any]:
    """Return the errors in percent of the measured figures, and for each slice how large they are.

    `today` has the time of a step for each name, as it would be predicted now.
    """
    predicted = {row["name"]: row for row in predictions["rows"]}
    reasons = _reasons(results, predicted)
    rows = [
        _row(predicted[row["name"]], row, today.get(row["name"]))
        for row in results["rows"]
        if row["name"] not in reasons
    ]
    return {
        "predicted_with": predictions["versions"],
        "measured_with": results["constants"].get("versions", {}),
        "rows": rows,
        "slices": [
            figures
            for name, belongs in SLICES.items()
            for way in (*WAYS, *TIMES)
            for figure in (MEMORY if way in WAYS else ("step_s",))
            if (figures := _slice(name, way, figure, [row for row in rows if belongs(row)]))
        ],
        "oom": [_verdicts(way, rows) for way in WAYS],
        "in_range_today": [row["in_range_today"] for row in rows if row["in_range_today"] is not None],
        "not_compared": reasons,
    }


def _row(predicted: Row, measured: Row, today: Row | None) -> Row:
    row = {key: predicted[key] for key in ("name", "method", "strategy", "ranks", "checkpointing")}
    row["out_of_memory"] = measured.get("failed") == "out of memory"
    row["predicted_out_of_memory"] = {way: predicted[way].get("out_of_memory") for way in WAYS}
    row["measured"] = {key: measured.get(key) for key in MEMORY} | {"step_s": measured.get("step_s_median")}
    row["errors_pct"] = {
        way: {figure: _error_pct(predicted[way].get(figure), measured.get(figure)) for figure in MEMORY} for way in WAYS
    }
    taken = measured.get("step_s_median")
    for way, time in zip(TIMES, (predicted["time"], today), strict=True):
        row["errors_pct"][way] = {"step_s": _error_pct((time or {}).get("step_s"), taken)}
    row["in_range_today"] = None if today is None or taken is None else today["low_s"] <= taken <= today["high_s"]
    return row


def _error_pct(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else 100 * (predicted / measured - 1)


def _slice(name: str, way: str, figure: str, rows: list[Row]) -> Row | None:
    errors = [error for row in rows if (error := row["errors_pct"][way][figure]) is not None]
    if not errors:
        return None
    sizes = sorted(abs(error) for error in errors)
    return {
        "slice": name,
        "way": way,
        "figure": figure,
        "rows": len(errors),
        "median_abs_pct": median(sizes),
        "p95_abs_pct": sizes[math.ceil(0.95 * len(sizes)) - 1],
        "max_abs_pct": sizes[-1],
        "under_5_pct_share": sum(error < -UNDER_PCT for error in errors) / len(errors),
    }


def _verdicts(way: str, rows: list[Row]) -> Row:
    """How often it was said rightly whether a configuration fits; rows that failed otherwise say nothing."""
    judged = [
        row
        for row in rows
        if row["predicted_out_of_memory"][way] is not None
        and (row["out_of_memory"] or row["measured"]["allocated_bytes"] is not None)
    ]
    out = [row for row in judged if row["out_of_memory"]]
    return {
        "way": way,
        "rows": len(judged),
        "right": sum(row["predicted_out_of_memory"][way] == row["out_of_memory"] for row in judged),
        "out_of_memory": len(out),
        "out_of_memory_right": sum(row["predicted_out_of_memory"][way] for row in out),
    }


def _reasons(results: dict[str, Any], predicted: dict[str, Row]) -> dict[str, str]:
    """Why a configuration is left out, whatever its errors would be."""
    reasons = {row["name"]: reason for row in results["rows"] if (reason := _reason(row, predicted.get(row["name"])))}
    return reasons | dict.fromkeys(results["not_reached"], "not reached within the budget")


def _reason(measured: Row, predicted: Row | None) -> str | None:
    if measured.get("failed") == "out of memory" and predicted is not None:
        return None
    if "failed" in measured or "skipped" in measured:
        return str(measured.get("failed") or measured["skipped"])
    if predicted is None:
        return "was not predicted"
    if predicted["traced"].get("parameters", {}).get("total", measured["parameters"]) != measured["parameters"]:
        return "is not the model that was predicted"
    return None


def table(compared: dict[str, Any]) -> str:
    """Return the comparison as text of three tables."""
    lines = [f"predicted with {_versions(compared['predicted_with'])}"]
    lines += [f"measured with  {_versions(compared['measured_with'])}", ""]
    lines += [
        f"{'':44} {'allocated':>27} {'reserved':>27} {'nvidia-smi':>27} {'step':>29}",
        f"{'configuration':44} "
        + f"{'GiB':>9} {'traced':>8} {'closed':>8} " * 3
        + f"{'s':>8} {'error':>8} {'today':>11}",
    ]
    lines += [_line(row) for row in compared["rows"] if row["measured"]["step_s"] is not None or row["out_of_memory"]]
    lines += [
        "",
        f"{'slice':13} {'figure':16} {'by':10} {'rows':>5} {'median':>8} {'p95':>8} {'max':>8} {'under 5 %':>10}",
    ]
    lines += [
        f"{s['slice']:13} {s['figure']:16} {s['way']:10} {s['rows']:5} {s['median_abs_pct']:7.2f}% "
        f"{s['p95_abs_pct']:7.2f}% {s['max_abs_pct']:7.2f}% {100 * s['under_5_pct_share']:9.1f}%"
        for s in compared["slices"]
    ]
    lines += [
        "",
        *(
            f"fits or not, {v['way']}: {v['right']} of {v['rows']} right, "
            f"{v['out_of_memory_right']} of {v['out_of_memory']} out of memory"
            for v in compared["oom"]
        ),
    ]
    if inside := compared["in_range_today"]:
        errors = [error for row in compared["rows"] if (error := row["errors_pct"]["time_today"]["step_s"]) is not None]
        lines.append(
            f"steps within the range that is predicted today: {sum(inside)} of {len(inside)}, "
            f"median {median(errors):+.1f}% with its sign"
        )
    lines += [f"not compared: {name}: {reason}" for name, reason in compared["not_compared"].items()]
    return "\n".join(lines)


def _line(row: Row) -> str:
    if row["out_of_memory"]:
        said = ", ".join(f"{way}: {row['predicted_out_of_memory'][way]}" for way in WAYS)
        return f"{row['name']:44} out of memory (said so? {said})"
    measured, errors = row["measured"], row["errors_pct"]
    cells = [
        f"{_gib(measured[figure])} {_pct(errors['traced'][figure])} {_pct(errors['closed'][figure])}"
        for figure in MEMORY
    ]
    inside = {None: "", True: "in", False: "out"}[row["in_range_today"]]
    times = f"{_pct(errors['time']['step_s'])} {_pct(errors['time_today']['step_s'])} {inside}".rstrip()
    return f"{row['name']:44} {' '.join(cells)} {measured['step_s']:8.3f} {times}"


def _gib(value: int | None) -> str:
    return f"{'-':>9}" if value is None else f"{value / GIB:9.3f}"


def _pct(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:+7.2f}%"


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(versions.items())) or "unknown versions"

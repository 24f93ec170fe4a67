"""Predictions against published measurements, by slice.

    python benchmarks/published_rows.py --rows FILE.csv [--json] [--python ENVIRONMENT/bin/python ...] [--only TEXT]

`--rows` is a file with the columns of `published.records.COLUMNS`. Memory comes from the traced step, by
the interpreter of `--python`: for the library versions that a source used, that of an environment with those (the rows
of fms-acceleration: transformers 4.48.1 or 4.45.2, peft 0.13.2, accelerate 1.0.1). Of several, each row is traced by
the one that has its version of transformers, by the first where none has. A row that is left out is counted with its
reason, found before anything is predicted; rows that the trace refuses are counted with what it says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from published.memory import compare_all, read_rows
from published.records import read_records
from published.spread import spread
from published.time import time_rows


def main() -> int:
    """Print the errors of all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--python", action="append", help="interpreter of an environment that traces; more than one")
    parser.add_argument("--only", default="", help="rows whose name holds this text")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    records = read_records(arguments.rows)
    rows, left_out = read_rows(records)
    memory, refused = compare_all(
        [row for row in rows if arguments.only in row.name], arguments.python or [sys.executable]
    )
    times, untimed = time_rows(records)
    times = [row for row in times if arguments.only in row["row"]]
    report = as_report(memory, times, left_out + refused, untimed)
    if arguments.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        show(report)
    return 0


def as_report(
    memory: list[dict[str, Any]], times: list[dict[str, Any]], left_out: Counter[str], untimed: dict[str, int]
) -> dict[str, Any]:
    """Return the tables by slice, the verdicts on fitting, what was left out, and every row."""
    failed = [row for row in memory if row["ran_out_of_memory"]]
    fitted = [row for row in memory if not row["ran_out_of_memory"]]
    return {
        "versions": _versions(memory),
        "memory": spread(error for row in fitted for error in named_errors(row)),
        "time": spread(((row["slice"], row["source"], "all"), row["error_pct"]) for row in times),
        "oom": {"rows": len(failed), "right": sum(row["predicted_out_of_memory"] for row in failed)},
        "fits": {"rows": len(fitted), "right": sum(not row["predicted_out_of_memory"] for row in fitted)},
        "skipped": {f"memory: {reason}": count for reason, count in left_out.items()}
        | {f"time: {reason}": count for reason, count in untimed.items()},
        "memory_rows": memory,
        "time_rows": times,
    }


def _versions(memory: list[dict[str, Any]]) -> dict[str, str]:
    """Return the versions of the libraries that traced the rows, by name; more than one where several did."""
    found: dict[str, set[str]] = {}
    for row in memory:
        for name, version in row.get("versions", {}).items():
            found.setdefault(name, set()).add(version)
    return {name: " and ".join(sorted(versions)) for name, versions in found.items()}


def named_errors(row: dict[str, Any]) -> list[tuple[tuple[str, ...], float]]:
    """Return a row's errors with their slices: its own figure counts in all of them, one beside it by its kind."""
    (kind, own), *beside = row["error_pct"].items()
    return [((kind, row["slice"], row["source"], "all"), own), *(((kind,), error) for kind, error in beside)]


def show(report: dict[str, Any]) -> None:
    """Print the report as tables."""
    print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    print(f"{'row':78} {'figure':16} {'measured':>9} {'predicted':>9} {'error':>8}")
    for row in report["memory_rows"]:
        for kind, error in row["error_pct"].items():
            predicted = row["predicted_gib"][kind] if "predicted_gib" in row else row["at_least_gib"]
            print(f"{row['row']:78} {kind:16} {row['measured_gib'][kind]:9.3f} {predicted:9.3f} {error:+7.2f}%")
        if row["ran_out_of_memory"] != row["predicted_out_of_memory"]:
            print(
                f"{row['row']:78} {'ran out of memory' if row['ran_out_of_memory'] else 'fitted'}, predicted otherwise"
            )
    for row in report["time_rows"]:
        print(
            f"{row['row']:78} {'step time s':16} {row['measured_s']:9.3f} {row['predicted_s']:9.3f} "
            f"{row['error_pct']:+7.2f}%"
        )
    for subject in ("memory", "time"):
        print(f"\n{subject:24} {'rows':>5} {'median':>8} {'95th':>8}   under by over 5 %")
        for s in report[subject]:
            print(
                f"{s['name']:24} {s['rows']:5} {s['median_abs_pct']:7.2f}% {s['p95_abs_pct']:7.2f}%   "
                f"{100 * s['under_5_pct_share']:.1f} %"
            )
    for verdict, words in (
        ("oom", "ran out of memory, and were predicted to"),
        ("fits", "fitted, and were predicted to"),
    ):
        print(f"\n{report[verdict]['right']} of {report[verdict]['rows']} rows that {words}")
    print()
    for reason, count in report["skipped"].items():
        print(f"left out {count:4}: {reason}")


if __name__ == "__main__":
    sys.exit(main())

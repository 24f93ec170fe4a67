"""`trainwright report`: the page or the document of one run or several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from trainwright.errors import ExitCode, UserError
from trainwright.reports.page import render
from trainwright.reports.run_report import read_report
from trainwright.reports.side_by_side import comparisons
from trainwright.runs.writing import plain, write_text_atomic
from trainwright.watch.run_lookup import find_run

SCHEMA_VERSION = 1


def report(runs: Sequence[str], output_dir: Path, out: Path | None, *, as_json: bool) -> None:
    """Write the page and print where, or print the document; with `out` and `as_json` do both.

    The page of a run lies in its folder, that of several beside the first.

    Raises:
        UserError: a run is not there, or the page cannot be written.
    """
    folders = [find_run(run, output_dir) for run in runs]
    reports = [read_report(folder) for folder in folders]
    if out is not None or not as_json:
        first = folders[0]
        own = first.report_html if len(folders) == 1 else first.path.parent / first.report_html.name
        path = own if out is None else out
        _write(path, render(reports))
        if not as_json:
            print(path)
    if as_json:
        document = {
            "schema_version": SCHEMA_VERSION,
            "runs": [one.to_json() for one in reports],
            "comparisons": [comparison.to_json() for comparison in comparisons(reports)],
        }
        print(json.dumps(plain(document), indent=2))


def _write(path: Path, page: str) -> None:
    if not path.parent.is_dir():
        raise UserError(
            f"there is no folder {path.parent} for the report", hints=["make it, or give another --out FILE"]
        )
    try:
        write_text_atomic(path, page)
    except OSError as error:
        raise UserError(
            f"the report cannot be written to {path}: {error.strerror}",
            hints=["give another place: --out FILE"],
            exit_code=ExitCode.STORAGE,
        ) from error

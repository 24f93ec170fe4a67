"""Which run is meant: by its name or by its folder."""

from __future__ import annotations

import difflib
from pathlib import Path

from trainwright.errors import ExitCode, UserError
from trainwright.runs.folder import RunFolder


def find_run(text: str, output_dir: Path) -> RunFolder:
    """Return the run of that folder, or of that name in `output_dir`; UserError names what there is, nearest first."""
    for path in (Path(text), output_dir / text):
        if (path / "run.json").is_file():
            return RunFolder(path)
    beside = Path(text).parent
    near = beside if beside.is_dir() and beside != Path() else output_dir
    known_names = sorted(path.parent.name for path in near.glob("*/run.json"))
    close = difflib.get_close_matches(Path(text).name, known_names, n=3, cutoff=0.5)
    hints = [f"did you mean {' or '.join(f'`{near / name}`' for name in close)}?"] if close else []
    if known_names:
        names = ", ".join(known_names[:20]) + (f" and {len(known_names) - 20} more" if len(known_names) > 20 else "")
        hints.append(f"runs in {near}/: {names}")
    else:
        hints.append(f"there is no run in {near}/: give the run's folder, `<output_dir>/<name>`")
    problem = "it has no run.json" if Path(text).is_dir() else "there is no such folder"
    raise UserError(f"no run `{text}`: {problem}", hints=hints, exit_code=ExitCode.MISSING)

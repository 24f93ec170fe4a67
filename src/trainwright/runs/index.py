"""Where this user's runs lie: one line a run in `runs.jsonl`. It only points; what a run is stands in its folder.

It can be lost at any time, and made again from the folders. Of runs that begin at once on a file system whose appends
are not atomic (NFS) a line may be torn, which is passed over and made good in the same way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trainwright.errors import UserError
from trainwright.runs import records
from trainwright.runs.folder import RunFolder
from trainwright.runs.user_data import user_data_dir
from trainwright.runs.writing import write_text_atomic


@dataclass(frozen=True)
class RunLocation:
    """A run by its identity, and the folder where it was seen last."""

    run_id: str
    path: str

    @property
    def is_there(self) -> bool:
        """Whether the folder still is that run's."""
        return place_of(Path(self.path)) == self


def place_of(path: Path) -> RunLocation | None:
    """Return the run in a folder, None where there is none that can be read."""
    try:
        folder = RunFolder(path)
        return RunLocation(folder.run_id, str(folder.path))
    except (UserError, OSError):
        return None


def index_file() -> Path:
    """Return the file, which need not exist."""
    return user_data_dir() / "runs.jsonl"


def add(folder: RunFolder) -> str | None:
    """Note where a run is, once; return None, or why it could not be noted, which is no reason to end a run."""
    try:
        place = RunLocation(folder.run_id, str(folder.path))
        if place not in known():
            index_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            records.append(index_file(), asdict(place))
    except (OSError, RuntimeError) as error:
        return f"`trainwright runs` will not list this run: {error}"
    return None


def known() -> list[RunLocation]:
    """Return the runs of the index, of one folder or one run its last entry, oldest first.

    A run that was moved stays under its old folder too until it is seen in the new one.
    """
    by_path: dict[str, RunLocation] = {}
    for record in records.read(index_file()):
        run_id, path = record.get("run_id"), record.get("path")
        if isinstance(run_id, str) and isinstance(path, str):
            by_path.pop(path, None)
            by_path[path] = RunLocation(run_id, path)
    places = list(by_path.values())
    later = {place.run_id: place for place in places}
    return [place for place in places if later[place.run_id] == place or place.is_there]


def rebuild(roots: Iterable[Path]) -> list[RunLocation]:
    """Make the index again from the run folders at or under `roots`, and return what was found there.

    Runs that it knows elsewhere stay in it.
    """
    roots = [root.absolute() for root in roots]
    located = sorted({place for root in roots for place in _under(root)}, key=lambda place: place.path)
    elsewhere = [place for place in known() if not any(Path(place.path).is_relative_to(root) for root in roots)]
    index_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = [json.dumps(asdict(place), separators=(",", ":")) + "\n" for place in (*elsewhere, *located)]
    write_text_atomic(index_file(), "".join(lines))
    return located


def _under(root: Path) -> Iterator[RunLocation]:
    """Yield the runs in a folder and its subfolders; links are not followed, and no run lies in another."""
    for parent, folders, files in os.walk(root):
        place = place_of(Path(parent)) if "run.json" in files else None
        if place is not None:
            folders.clear()
            yield place

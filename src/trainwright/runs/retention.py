"""Which checkpoint to go on from and which to delete: by attempt and step as manifests state them, never by clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainwright.runs.folder import RunFolder
from trainwright.runs.manifest import CorruptCheckpoint, Manifest, read_manifest, verify
from trainwright.runs.trash import remove, set_aside
from trainwright.runs.writing import sync_dir


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that is not used, and why."""

    path: Path
    reason: str


def newest_valid(
    folder: RunFolder, check: Callable[[Manifest], None] = lambda manifest: None
) -> tuple[Path | None, Manifest | None, list[Skipped]]:
    """Return the newest checkpoint of this run whose every file verifies, and all those passed over on the way.

    `check` raises CorruptCheckpoint for one whose state its reader could make nothing of.

    Newest is the largest step of the latest attempt that committed one: an attempt that resumed from an earlier step,
    because a later checkpoint was damaged or the user said so, is the run's history from there on.
    """
    skipped: list[Skipped] = []
    for path, manifest in _newest_first(folder, skipped):
        try:
            check(manifest)
            return path, verify(path, manifest.run_id), skipped
        except CorruptCheckpoint as error:
            skipped.append(Skipped(path, error.reason))
    return None, None, skipped


def retain(folder: RunFolder, keep: int, best_step: int | None) -> list[int]:
    """Delete all checkpoints of this run but the newest `keep` and the one of `best_step`; return the steps deleted.

    What is not provably a checkpoint of this run is never touched.
    """
    assert keep >= 1, keep
    surplus = [manifest.step for _, manifest in _newest_first(folder, [])[keep:] if manifest.step != best_step]
    aside = []
    for step in surplus:
        with contextlib.suppress(FileNotFoundError):  # somebody deleted it by hand
            aside.append(set_aside(folder.checkpoint_dir(step)))
    if aside:
        # Without it a power cut could undo the renames after the files are gone.
        sync_dir(folder.path)
    for path in aside:
        remove(path)
    return sorted(surplus)


def sweep(folder: RunFolder) -> list[str]:
    """Remove leftovers of crashes and of former attempts; return their names."""
    return folder.sweep()


def _newest_first(folder: RunFolder, skipped: list[Skipped]) -> list[tuple[Path, Manifest]]:
    run_id = folder.run_id
    own = []
    for step, path in folder.checkpoints():
        try:
            manifest = read_manifest(path)
            if manifest.run_id != run_id:
                raise CorruptCheckpoint(f"it belongs to another run ({manifest.run_id}, not {run_id})")
            if manifest.step != step:
                raise CorruptCheckpoint(f"its manifest is of step {manifest.step}")
        except CorruptCheckpoint as error:
            skipped.append(Skipped(path, error.reason))
        else:
            own.append((path, manifest))
    return sorted(own, key=lambda entry: (entry[1].attempt, entry[1].step), reverse=True)

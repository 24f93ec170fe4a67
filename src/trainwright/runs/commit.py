"""How a checkpoint comes to be: staged under a hidden name, sealed, and committed by one rename."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.runs.folder import RunFolder
from trainwright.runs.manifest import (
    MANIFEST_NAME,
    CorruptCheckpoint,
    FileDigest,
    Manifest,
    check_member_name,
    read_manifest,
)
from trainwright.runs.trash import FOREIGN_PREFIX, TRASH_PREFIX, remove, set_aside
from trainwright.runs.writing import plain, sync_dir, write_new


def open_staging(folder: RunFolder, step: int, attempt: int) -> Path:
    """Return a new, empty staging folder; UserError if another attempt has taken over."""
    folder.require_fence(attempt)
    discard_staging(folder, step, attempt)
    staging = folder.staging_dir(step, attempt)
    staging.mkdir(mode=0o700)
    return staging


def discard_staging(folder: RunFolder, step: int, attempt: int) -> None:
    """Remove the staging folder of a save that failed, if there is one."""
    staging = folder.staging_dir(step, attempt)
    if os.path.lexists(staging):
        remove(staging)


def commit(
    folder: RunFolder,
    step: int,
    attempt: int,
    digests: Mapping[str, FileDigest],
    *,
    contract: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Path:
    """Turn the staging folder into `checkpoint-<step>` and return its path; one process calls it, after a barrier.

    `digests` maps the path of every file inside the staging folder to what `seal_file` returned for it. When this
    returns, the checkpoint survives a crash of the machine; after an OSError it may be called again. A checkpoint that
    already bears the name is replaced, one of another run renamed to `foreign-`. UserError if another attempt has taken
    over or a file is missing; OSError if the storage fails.
    """
    folder.require_fence(attempt)
    staging, final = folder.staging_dir(step, attempt), folder.checkpoint_dir(step)
    if not staging.exists() and _is_in_place(final, folder.run_id, attempt, digests):
        sync_dir(folder.path)  # all that an earlier call can have failed at
        return final
    try:
        problems = _missing(staging, digests)
        if problems:
            folder.require_fence(attempt)
            raise UserError(
                f"the checkpoint staged in {staging} is not complete, so it is not committed",
                problems=problems,
                hints=["all ranks must see the same output_dir: put it on storage that they share"],
                exit_code=ExitCode.STORAGE,
            )
        manifest = Manifest(
            run_id=folder.run_id,
            step=step,
            attempt=attempt,
            files=dict(digests),
            contract=plain(contract),
            state=plain(state),
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        (staging / MANIFEST_NAME).unlink(missing_ok=True)
        write_new(staging / MANIFEST_NAME, manifest.to_bytes())
        for parent, _, _ in os.walk(staging, topdown=False):
            sync_dir(Path(parent))
        folder.require_fence(attempt)
        return _publish(staging, final, manifest.run_id)
    except FileNotFoundError:
        # A newer attempt renames our staging folder away, whatever we were doing to it.
        folder.require_fence(attempt)
        raise


def _is_in_place(final: Path, run_id: str, attempt: int, digests: Mapping[str, FileDigest]) -> bool:
    try:
        manifest = read_manifest(final)
    except CorruptCheckpoint:
        return False
    return (manifest.run_id, manifest.attempt, manifest.files) == (run_id, attempt, digests)


def _missing(staging: Path, digests: Mapping[str, FileDigest]) -> list[str]:
    """Return what is wrong with the staged files, one line each."""
    problems = []
    for name, digest in digests.items():
        check_member_name(name)
        path = staging / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != digest.size_bytes:
            problems.append(f"{name} has {path.stat().st_size} bytes, {digest.size_bytes} when it was sealed")
    staged = {path.relative_to(staging).as_posix() for path in staging.rglob("*") if not path.is_dir()}
    unsealed = staged - {MANIFEST_NAME, *digests}
    assert not unsealed, f"staged but never sealed: {sorted(unsealed)}"
    return problems


def _publish(staging: Path, final: Path, run_id: str) -> Path:
    displaced = _make_way(final, run_id)
    try:
        staging.rename(final)
    except OSError:
        if displaced is not None:
            displaced.rename(final)
        raise
    sync_dir(final.parent)
    if displaced is not None and displaced.name.startswith(TRASH_PREFIX):
        remove(displaced)
    return final


def _make_way(final: Path, run_id: str) -> Path | None:
    """Rename what bears the name already: into the trash, but never a checkpoint of another run."""
    if not os.path.lexists(final):
        return None
    try:
        foreign = read_manifest(final).run_id != run_id
    except CorruptCheckpoint:
        foreign = False
    return set_aside(final, FOREIGN_PREFIX if foreign else TRASH_PREFIX)

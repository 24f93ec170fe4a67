"""sha256 of large files, each read once: the user's `file_hashes.json` keeps it until the file changes.

A file is taken as unchanged while its size, inode, time of last write and time of last change are. The last of these is
set by the kernel alone, so that a file which was rewritten with its old time is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainwright.errors import ExitCode, UserError
from trainwright.runs.manifest import FileDigest
from trainwright.runs.user_data import user_data_dir
from trainwright.runs.writing import write_json_atomic

AT_ONCE: Final = 4
"""Files that are read side by side: more do not make a disk faster."""
KEPT_FILES: Final = 2000
SETTLED_S: Final = 2.0
"""A file written to within this time could change again without a new time: file systems keep coarse ones."""


@dataclass(frozen=True)
class _Kept:
    """What is known of a file, under what it looked like then."""

    looks: tuple[int, ...]
    sha256: str


def file_digests(paths: Iterable[Path]) -> dict[Path, FileDigest]:
    """Return size and sha256 of each file; one that is known and unchanged is not read.

    Raises:
        UserError: a file is not there or cannot be read.
    """
    paths = list(paths)
    kept = _kept()
    waiting: queue.SimpleQueue[Path] = queue.SimpleQueue()
    outcomes: dict[Path, FileDigest | OSError] = {}
    fresh: dict[str, _Kept] = {}
    for path in paths:
        waiting.put(path)

    def read_all() -> None:
        while True:
            try:
                path = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                outcomes[path] = _digest(path, kept, fresh)
            except OSError as error:
                outcomes[path] = error

    # Daemons: a command that ends early must not wait for the rest of a file.
    readers = [threading.Thread(target=read_all, daemon=True) for _ in range(min(AT_ONCE, len(paths)))]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if fresh:
        _keep(kept | fresh)
    return {path: _or_raise(path, outcomes[path]) for path in paths}


def _digest(path: Path, kept: Mapping[str, _Kept], fresh: dict[str, _Kept]) -> FileDigest:
    began_s = time.time()
    name = str(path.resolve())
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        known = kept.get(name)
        if known is not None and known.looks == _looks(before):
            return FileDigest(before.st_size, known.sha256)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.fstat(file.fileno())
    if _looks(before) == _looks(after) and max(after.st_mtime, after.st_ctime) < began_s - SETTLED_S:
        fresh[name] = _Kept(_looks(after), sha256)
    return FileDigest(after.st_size, sha256)


def _looks(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _or_raise(path: Path, outcome: FileDigest | OSError) -> FileDigest:
    if isinstance(outcome, OSError):
        raise UserError(
            f"{path} cannot be read: {outcome.strerror}", hints=["restore the file"], exit_code=ExitCode.MISSING
        ) from outcome
    return outcome


def _file() -> Path | None:
    try:
        return user_data_dir() / "file_hashes.json"
    except RuntimeError:  # the user has no home; all files are read each time
        return None


def _kept() -> dict[str, _Kept]:
    file = _file()
    try:
        content = json.loads(file.read_bytes()) if file is not None else {}
    except (OSError, ValueError, RecursionError):
        return {}
    entries = content.items() if isinstance(content, dict) else ()
    return {name: _Kept(tuple(entry["looks"]), entry["sha256"]) for name, entry in entries if _is_whole(entry)}


def _is_whole(entry: Any) -> bool:
    looks, sha256 = (entry.get("looks"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    return isinstance(sha256, str) and isinstance(looks, list) and all(type(number) is int for number in looks)


def _keep(entries: Mapping[str, _Kept]) -> None:
    """Keep the newest entries; a disk that takes no more only means that files are read again."""
    file = _file()
    if file is None:
        return
    newest = list(entries.items())[-KEPT_FILES:]
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json_atomic(file, {name: {"looks": entry.looks, "sha256": entry.sha256} for name, entry in newest})
    except OSError:
        return

"""Removal in two steps: a folder first loses its name in one rename, and only then its files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

TRASH_PREFIX = ".trash-"
FOREIGN_PREFIX = "foreign-"


def set_aside(path: Path, prefix: str = TRASH_PREFIX) -> Path:
    """Rename `path` out of the way and return where it is now; FileNotFoundError if it is not there."""
    aside = path.parent / f"{prefix}{path.name.lstrip('.')}-{os.urandom(4).hex()}"
    return path.rename(aside)


def remove(path: Path) -> bool:
    """Delete a file, a link (not what it points to) or a whole folder; False if something of it is left."""
    if path.is_dir() and not path.is_symlink():
        # NFS keeps a file that is still open somewhere as .nfsXXXX; the sweep of the next start takes the rest.
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return not os.path.lexists(path)

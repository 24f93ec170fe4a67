"""Writing that survives a crash: a file is the old one or the new one, never half of either."""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainwright.errors import UserError

TEMPORARY_PREFIX = ".tmp-"


def plain(value: object) -> Any:
    """Return `value` as what JSON can hold; TypeError if it cannot be.

    Numbers of other libraries become int or float, paths become text, NaN and infinity become null.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        return plain(value.item())
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def sync_dir(path: Path) -> None:
    """Make the names inside a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network and FUSE file systems offer no fsync of a folder; PostgreSQL's fd.c passes over the same two.
        if error.errno not in (errno.EBADF, errno.EINVAL):
            raise
    finally:
        os.close(fd)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that does not exist yet, readable by its owner only, and make its content durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def write_json_atomic(path: Path, obj: object) -> None:
    """Replace `path` by `obj` as JSON: temporary file, fsync, rename, fsync of the folder."""
    with _temporary(path, _json(obj)) as temporary:
        temporary.replace(path)
        sync_dir(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace `path` by a text of UTF-8 in the same way."""
    with _temporary(path, text.encode()) as temporary:
        temporary.replace(path)
        sync_dir(path.parent)


def write_json_once(path: Path, obj: object) -> None:
    """Write `path` as JSON unless it is there already; of several writers at once the first wins."""
    with _temporary(path, _json(obj)) as temporary:
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return
        except OSError:
            # FAT and some FUSE file systems have no hard links; there the last of two writers at once wins.
            if not path.exists():
                temporary.replace(path)
        sync_dir(path.parent)


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; FileNotFoundError if there is none, UserError if it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}", hints=[f"restore or remove {path}"]) from error


def _json(obj: object) -> bytes:
    return (json.dumps(plain(obj), indent=2, allow_nan=False) + "\n").encode()


@contextlib.contextmanager
def _temporary(path: Path, data: bytes) -> Iterator[Path]:
    temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name}-{os.urandom(4).hex()}"
    try:
        write_new(temporary, data)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)

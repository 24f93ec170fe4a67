"""Room and trouble on the storage: free space before, and a few more tries when a write fails."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainwright.errors import ExitCode, UserError

Result = TypeVar("Result")

# Quotas and parallel file systems often fail for a moment only.
_TRANSIENT = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
_LASTING = {errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM}
# Six seconds in all: a disk that is really full is reported within ten.
_WAITS_S = (2.0, 4.0)
# How libraries word a failed write when they raise something of their own: safetensors, and torch's zip writer,
# which on a full disk only says `unexpected pos`.
_WORDINGS = {
    "no space left": errno.ENOSPC,
    "os error 28": errno.ENOSPC,
    "unexpected pos": errno.ENOSPC,
    "disk quota exceeded": errno.EDQUOT,
    "input/output error": errno.EIO,
    "os error 5)": errno.EIO,
    "read-only file system": errno.EROFS,
    "file too large": errno.EFBIG,
}


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write where `path` lies or will lie; quotas are not seen."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def require_free_space(path: Path, needed_bytes: int, what: str) -> None:
    """Raise UserError (exit 73) with the figures unless `needed_bytes` are free where `path` lies."""
    free = free_bytes(path)
    if free < needed_bytes:
        raise UserError(
            f"not enough space for {what} in {path}: needs {needed_bytes:,} bytes, free are {free:,}",
            hints=[
                f"free {needed_bytes - free:,} bytes",
                "keep fewer checkpoints: checkpoint.keep=1",
                "set output_dir",
            ],
            exit_code=ExitCode.STORAGE,
        )


def storage_errno(error: BaseException) -> int | None:
    """Return the errno if the storage is what failed, also where a library wrapped it in an error of its own."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, OSError) and current.errno in _TRANSIENT | _LASTING:
            return current.errno
        text = str(current).lower()
        for wording, number in _WORDINGS.items():
            if wording in text:
                return number
        current = current.__cause__ or current.__context__
    return None


def _warn(line: str) -> None:
    # A rank's log lies on the same disk: that it is full must not be what ends the tries.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def retry_storage(
    operation: Callable[[], Result],
    describe: str,
    *,
    path: Path | None = None,
    needed_bytes: int | None = None,
    clean_up: Callable[[], None] | None = None,
    also: tuple[type[BaseException], ...] = (RuntimeError,),
    warn: Callable[[str], None] = _warn,
) -> Result:
    """Return what `operation` returns, after up to three tries when the storage fails for a moment.

    `describe` says what is being done (`saving checkpoint-40`), `path` where. `clean_up` runs after every failed try.
    `also` are the errors in which libraries wrap a failed write; one that is not about storage goes through unchanged.
    Raises UserError (exit 73) with path, needed and free bytes once it is clear that the storage stays as it is.
    """
    failures: tuple[type[BaseException], ...] = (OSError, *also)
    for wait_s in (*_WAITS_S, None):
        try:
            return operation()
        except failures as error:
            number = storage_errno(error)
            where = path or Path(getattr(error, "filename", None) or Path.cwd())
            free = free_bytes(where)
            if clean_up is not None:
                clean_up()
            if number is None:
                raise
            reason = os.strerror(number)
            if wait_s is None or number in _LASTING:
                needed = "an unknown number of" if needed_bytes is None else f"{needed_bytes:,}"
                raise UserError(
                    f"{describe} failed: {reason} ({where}: needs {needed} bytes, free were {free:,})",
                    hints=[
                        "free space or repair the storage, then run the same command to go on from the last checkpoint"
                    ],
                    exit_code=ExitCode.STORAGE,
                ) from error
        warn(f"warning: {describe} failed ({reason}, {free:,} bytes free); trying again in {wait_s:g} s")
        time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")

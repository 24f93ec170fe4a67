"""The run lock: one process at a time starts, resumes or submits a run; the kernel frees it when the holder dies."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.runs.folder import RunFolder


class RunLock:
    """Hold `run.lock`, or another `file`, as a context manager.

    Raises:
        UserError: another process holds it; process, host and start time are named.

    The lock belongs to the open file (flock), which no child started by exec inherits: it ends with this process.

    `is_gone` says of what the holder wrote of itself whether it is known to have lost its machine. It may still run
    there, so that the kernel, or the file server, keeps its lock: then the file is replaced by another, and the fence
    keeps what the former holder writes out of the run.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        file: Path | None = None,
        is_gone: Callable[[Mapping[str, Any]], bool] = lambda holder: False,
    ) -> None:
        self._path = file or folder.lock_file
        self._is_gone = is_gone
        self._run = folder.path
        self._fd = -1

    def __enter__(self) -> RunLock:
        while not self._take():
            self._close()
        self._write_holder()
        return self

    def _take(self) -> bool:
        """Lock the file; return False where it was replaced meanwhile, or is to be."""
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._is_in_place()
        except BlockingIOError:
            holder = self._holder()
            if self._is_gone(holder):
                if self._is_in_place():
                    self._path.unlink(missing_ok=True)
                return False
            self._close()
            raise UserError(
                f"another process works on {self._run}: {_describe(holder)}",
                hints=["wait until it ends, or stop it with Ctrl+C or SIGTERM", "give this run a name of its own"],
            ) from None
        except OSError as error:
            self._close()
            raise UserError(
                f"{self._path} cannot be locked: {error.strerror}",
                hints=["put output_dir on a file system with flock (Lustre: mount option -o flock)"],
                exit_code=ExitCode.STORAGE,
            ) from error

    def _is_in_place(self) -> bool:
        """Say whether the open file is the one that bears the name now."""
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.stat())
        except FileNotFoundError:
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.ftruncate(self._fd, 0)
        # Said aloud for a child that was forked without exec and still has the file open.
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _write_holder(self) -> None:
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        }
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(holder).encode(), 0)

    def _holder(self) -> dict[str, Any]:
        """Return what the holder wrote of itself; it may have locked and not written yet, so wait up to a second."""
        deadline_s = time.monotonic() + 1
        holder: dict[str, Any] = {}
        while (not holder or _is_dead(holder)) and time.monotonic() < deadline_s:
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                holder = dict(json.loads(os.pread(self._fd, 4096, 0)))
            time.sleep(0.01)
        return holder


def may_be_held(folder: RunFolder) -> bool:
    """Say whether a process that may still live has written into the lock file that it holds the run.

    The lock itself is not tried: that would shut out who takes it at this moment.
    """
    try:
        holder = json.loads(folder.lock_file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(holder, dict) and not _is_dead(holder)


def _is_dead(holder: dict[str, Any]) -> bool:
    """Say whether the text is of an earlier holder, killed on this machine."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or type(pid) is not int or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "it has not said which"
    job = f", Slurm job {holder['slurm_job_id']}" if holder.get("slurm_job_id") else ""
    return f"pid {holder.get('pid')} on {holder.get('host')}, since {holder.get('started_at')}{job}"

"""Entry of one rank: `python -m trainwright.train RUN_DIR`, with RANK, LOCAL_RANK, WORLD_SIZE from the launcher."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn

from trainwright.errors import ExitCode, UserError
from trainwright.framework_imports import collector_at_rest
from trainwright.out_of_memory import OutOfMemoryError
from trainwright.runs.folder import RunFolder
from trainwright.runs.kill_domain import die_with_launcher
from trainwright.runs.storage import storage_errno
from trainwright.train.stopping import StopRequest


def main() -> int:
    """Run one rank; what ends it is written beside its log, so that the launcher can tell cause from consequence."""
    die_with_launcher()
    os.umask(0o077)  # what a run writes is for its owner alone, also where a library makes the file
    stop = StopRequest()
    stop.listen()
    faulthandler.enable()
    stacks = _open_stack_file()
    faulthandler.register(signal.SIGUSR1, stacks or sys.stderr)
    sys.excepthook = _end
    # The frameworks warn of their own internals on every start; none of it is for the user.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|transformers")
    warnings.filterwarnings("ignore", category=UserWarning, module="deepspeed")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with collector_at_rest():
        from trainwright.train.worker import run_rank

    return run_rank(Path(sys.argv[1]), stop)


def _open_stack_file() -> BinaryIO | None:
    """Return the file that SIGUSR1 fills; forked children (workers of a DataLoader) have it too. None: no room for it.

    The handler is C and needs no lock of the interpreter, so that it speaks for a rank that holds one for ever.
    """
    folder, attempt = RunFolder(sys.argv[1]), int(os.environ["TRAINWRIGHT_ATTEMPT"])
    with contextlib.suppress(OSError):
        return folder.stack_file(attempt, int(os.environ["RANK"])).open("ab", buffering=0)
    return None


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write down what ended this rank and leave at once.

    Not through the interpreter's shutdown: another rank may wait in a collective, whose threads would hold this one.
    """
    reason = storage_errno(error) if isinstance(error, OSError) else None
    if reason is not None:
        error = UserError(
            f"the storage failed: {os.strerror(reason)} ({getattr(error, 'filename', None) or sys.argv[1]})",
            hints=["free space or repair the storage, then run the same command to go on from the last checkpoint"],
            exit_code=ExitCode.STORAGE,
        )
    if isinstance(error, UserError):
        exit_code, text = int(error.exit_code), error.render()
    else:
        exit_code, text = int(ExitCode.FAILED), "".join(traceback.format_exception(kind, error, trace))
    rank, attempt = os.environ["RANK"], os.environ["TRAINWRIGHT_ATTEMPT"]
    record = {"rank": int(rank), "exit_code": exit_code, "time_s": time.time(), "text": text}
    if isinstance(error, OutOfMemoryError):
        record["out_of_memory_in"] = error.doing
    path = Path(sys.argv[1]) / "logs" / f"attempt_{attempt}" / f"rank_{rank}.error.json"
    with contextlib.suppress(OSError):  # on a full disk the exit status alone has to say it
        path.write_text(json.dumps(record))
        print(text, file=sys.stderr, flush=True)
    os._exit(exit_code)


def leave_with(run: Callable[[], int]) -> NoReturn:
    """Run this process's `main` and end with what it returns, after all exit handlers, without the shutdown itself.

    Threads of gloo and NCCL outlive their process group where DDP, FSDP or DeepSpeed still refer to it. Before Python
    3.14 one that asks for the interpreter while that shuts down is ended through C++ code that forbids it, which aborts
    the whole process: https://github.com/pytorch/pytorch/pull/179291
    """
    exit_code: int | None = None

    def leave() -> None:
        if exit_code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)

    atexit.register(leave)  # the first to be registered is the last to run: trackers close in theirs
    exit_code = int(run())
    sys.exit(exit_code)


if __name__ == "__main__":
    leave_with(main)

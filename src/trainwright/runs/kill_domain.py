"""A worker never outlives the launcher that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_launcher() -> None:
    """Have this process killed when the launcher dies, however that happens.

    On Linux the kernel does it, even while the interpreter is stuck; elsewhere a thread looks once a second. A worker
    that was started by hand has no launcher.
    """
    launcher = int(os.environ.get("TRAINWRIGHT_LAUNCHER_PID", os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:
        os._exit(1)


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    os.killpg(os.getpid(), signal.SIGKILL)

"""How many threads a process computes with, and how they wait for each other."""

from __future__ import annotations

import os
from typing import Final

_WAITING_IS_SET_BY: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user says how OpenMP's threads wait: the standard's, GNU's and LLVM's own."""


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and by its container's quota."""
    from trainwright.hardware.host import read_host  # it imports psutil, which most commands do not need

    cores = read_host()[0].cores
    assert isinstance(cores, int)
    return cores


def thread_environment(processes: int) -> dict[str, str]:
    """Return the variables for OpenMP in each of `processes` that share this machine; what the user has set stays.

    Threads share the cores evenly and sleep while they wait. By default they spin for milliseconds, and where another
    program runs on one of the cores, the thread that is waited for does not get it. Measured on two cores
    (`benchmarks/shared_machine.py`): beside one busy process a step of 0.3 M parameters took 0.88 s with threads that
    spin and 0.032 s with threads that sleep, one of 13 M parameters 4.3 and 0.51 s. On an idle machine sleeping costs:
    0.035 instead of 0.018 s, and 0.32 instead of 0.27 s; GOMP_SPINCOUNT=300000 gets that back.
    """
    share = str(max(1, usable_cores() // processes))
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or share, **waiting_policy()}


def waiting_policy() -> dict[str, str]:
    """Return the variable that lets OpenMP's threads sleep while they wait, with the user's own value if there is one.

    The variables that the user has set are returned too, as ssh hands no environment on.
    """
    by_user = {name: os.environ[name] for name in _WAITING_IS_SET_BY if os.environ.get(name)}
    return by_user or {"OMP_WAIT_POLICY": "PASSIVE"}

"""Probes whose workers are forks of this process, in which torch and transformers are loaded already.

They are the product's own, `trainwright.tune.tuning.tune` with the workers of `python -m trainwright.train`; the starts
of hundreds of Pythons would take most of the time of a benchmark.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainwright.job.schema import Job
from trainwright.launch.prepare_run import write_run_files
from trainwright.launch.processes import Processes
from trainwright.launch.supervision import rank_environment
from trainwright.plan.choose import Plan
from trainwright.plan.layout import Layout
from trainwright.runs.folder import RunFolder
from trainwright.tune.probes import ProbeWatch, WorkerProbes


class Forked:
    """A worker forked from this process, as subprocess.Popen gives it."""

    def __init__(self, main: Callable[[], int], environment: dict[str, str], log: Path, run_dir: Path) -> None:
        launcher = str(os.getpid())
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self.returncode: int | None = None
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            os.environ.update(environment, TRAINWRIGHT_LAUNCHER_PID=launcher)
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            for stream in (1, 2):
                os.dup2(descriptor, stream)
            sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
            sys.argv = ["trainwright.train", str(run_dir)]
            code = main()
        finally:
            if sys.exc_info()[1] is not None:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(code)

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        """Return the exit status once it has ended."""
        while (code := self.poll()) is None:
            time.sleep(0.005)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)


def start_forked(folder: RunFolder, layout: Layout, attempt: int) -> Processes:
    """Start every rank as a fork of this process."""
    from trainwright.train.__main__ import main

    processes = Processes()
    for rank in range(layout.ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(layout.ranks)}
        environment = place | {"LOCAL_WORLD_SIZE": str(layout.ranks)} | rank_environment(layout, layout.ranks, attempt)
        processes.children.append(Forked(main, environment, folder.rank_log(attempt, rank), folder.path))  # type: ignore[arg-type]
    return processes


def forked_probes(folder: RunFolder, job: Job, plan: Plan, watch: ProbeWatch) -> WorkerProbes:
    """Return probes whose workers are forks, and whose data is prepared in one."""
    from trainwright.train.prepare import main

    folder.create()
    write_run_files(folder, job, plan.to_json())
    prepared = Forked(lambda: main([str(folder.path)]), {}, folder.path / "prepare.log", folder.path).wait()
    assert prepared == 0, (folder.path / "prepare.log").read_text()
    return WorkerProbes(folder, job, plan, watch, start_ranks=start_forked)

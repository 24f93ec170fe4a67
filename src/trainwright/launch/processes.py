"""The processes of one attempt, in one kill domain: started together, watched, and gone together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainwright.launch.failures import Failure, read_failures

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
"""SIGHUP is what a terminal sends that is closed."""
COLLATERAL_GRACE_S = 3.0
"""How long the other ranks may take to write down why they failed, before they are killed."""


@dataclass
class Processes:
    """Child processes by rank; each is a session of its own, so that Ctrl+C reaches the launcher alone.

    A child asks the kernel to die with its launcher (`trainwright.runs.kill_domain`), so that nothing survives a
    SIGKILL of it either.
    """

    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start `python -m module arguments` as the next rank, with all its output in `log`.

        `inherited` are open file descriptors that it keeps, by the same numbers.
        """
        self.start_command([sys.executable, "-m", module, *arguments], environment, log, inherited=inherited)

    def start_command(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, inherited: Sequence[int] = ()
    ) -> None:
        """Start a command as the next child, with all its output in `log`."""
        # A child inherits what is blocked: a signal that comes before it listens waits, instead of killing it.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with log.open("ab") as output:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment, "TRAINWRIGHT_LAUNCHER_PID": str(os.getpid())},
                    start_new_session=True,
                    pass_fds=inherited,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        self.children.append(child)

    @property
    def running(self) -> bool:
        """Whether any process is still there."""
        return any(child.poll() is None for child in self.children)

    @property
    def failed(self) -> bool:
        """Whether any process ended otherwise than done or cleanly stopped."""
        return any(child.poll() not in (None, 0, 75) for child in self.children)

    def exit_codes(self) -> list[int | None]:
        """Return the exit status of each rank as subprocess gives it: negative for a signal, None while it runs."""
        return [child.poll() for child in self.children]

    def failures(self, attempt_dir: Path) -> list[Failure]:
        """Return the failures of the ranks that did not fall by the launcher's own hand."""
        return read_failures(attempt_dir, self.exit_codes(), self.killed)

    def ask_to_stop(self) -> None:
        """Ask every rank to save and end at the next step boundary."""
        for child in self.children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End every process and all that it started, at once."""
        for rank, child in enumerate(self.children):
            if child.poll() is None:
                self.killed.add(rank)
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for child in self.children:
            child.wait()

    def wait_for_collateral(self) -> None:
        """Let the surviving ranks notice a failure for a moment, then end them."""
        deadline_s = time.monotonic() + COLLATERAL_GRACE_S
        while self.running and time.monotonic() < deadline_s:
            time.sleep(0.05)
        self.kill()

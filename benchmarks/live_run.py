"""A real `trainwright train`, started as a user would, watched and hurt from outside."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from trainwright.runs.records import read
from trainwright.runs.writing import read_json

Found = TypeVar("Found")
# Makes its standard input the controlling terminal, and so the source of Ctrl+C, before it becomes the command.
ON_TERMINAL = (
    sys.executable,
    "-c",
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])",
)
TINY_GPT2 = {
    "architecture": "gpt2",
    "dimensions": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 128,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    },
}
"""A model with dropout, so that a resume which lost its place in the random numbers would show."""
PATIENCE_S = 240
"""Longest wait for anything to happen; a start takes 5 s on an idle machine and a minute on a busy one."""


class LiveRun:
    """One `trainwright train` process and the ranks that it starts.

    `folder` holds job.yaml and is where the command runs; `run_dir` is the run folder. All that the command says goes
    to `console`, which later starts of the same run append to.
    """

    def __init__(
        self,
        folder: Path,
        run_dir: Path,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        on_terminal: bool = False,
    ) -> None:
        self.run_dir, self.console = run_dir, folder / f"{run_dir.name}.console"
        self._said_before = self.console.stat().st_size if self.console.exists() else 0
        self.attempt_before = self.attempt
        self._keyboard: int | None = None
        terminal: int | None = None
        if on_terminal:
            self._keyboard, terminal = pty.openpty()
        command = [sys.executable, "-m", "trainwright", "train", "job.yaml", *arguments]
        with self.console.open("ab") as output:
            self.launcher = subprocess.Popen(
                [*ON_TERMINAL, *command] if on_terminal else command,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})},
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=output if terminal is None else terminal,
                stderr=output if terminal is None else terminal,
                start_new_session=True,
            )
        if terminal is not None:
            os.close(terminal)
            threading.Thread(target=self._read_screen, daemon=True).start()

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind, whatever went wrong."""
        self.launcher.kill()
        self.launcher.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _read_screen(self) -> None:
        assert self._keyboard is not None
        with self.console.open("ab", buffering=0) as output, contextlib.suppress(OSError, ValueError):
            # Waits outside of the call that reads, which would keep a closed terminal open.
            while (keyboard := self._keyboard) is not None:
                if select.select([keyboard], [], [], 0.1)[0]:
                    if not (text := os.read(keyboard, 4096)):
                        return
                    output.write(text)

    def press(self, keys: bytes) -> None:
        """Type on the terminal that the command runs on; b"\\x03" is Ctrl+C."""
        assert self._keyboard is not None
        os.write(self._keyboard, keys)

    def hang_up(self) -> None:
        """Close the terminal that the command runs on; what it says from then on is lost."""
        assert self._keyboard is not None
        keyboard, self._keyboard = self._keyboard, None
        os.close(keyboard)

    @property
    def said(self) -> str:
        """All that this start of the command has printed."""
        return self.console.read_bytes()[self._said_before :].decode("utf-8", "replace")

    @property
    def attempt(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        fence = self.run_dir / "fence.json"
        return int(read_json(fence)["attempt"]) if fence.exists() else 0

    def start_step(self, attempt: int) -> int | None:
        """Return the step that an attempt began from; None while it has not begun."""
        path = self.run_dir / "logs" / f"attempt_{attempt}" / "start.json"
        return int(read_json(path)["step"]) if path.exists() else None

    def last_step(self, attempt: int) -> int:
        """Return the last step that an attempt recorded; the one it began from if there is none."""
        steps = [row["step"] for row in read(self.run_dir / "metrics.jsonl") if row["attempt"] == attempt]
        return max(steps, default=self.start_step(attempt) or 0)

    def processes(self) -> list[psutil.Process]:
        """Return every process that works on the run folder, the launcher aside."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != self.launcher.pid and str(self.run_dir) in process.cmdline():
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """Return the rank processes that are alive, by rank."""
        ranks: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.launcher.pid).children():
                with contextlib.suppress(psutil.Error):
                    # A process that is just being started has the command line already, and no environment yet.
                    rank = process.environ().get("RANK") if "trainwright.train" in process.cmdline() else None
                    if rank is not None and process.status() != psutil.STATUS_ZOMBIE:
                        ranks[int(rank)] = process
        return [ranks[rank] for rank in sorted(ranks)]

    def staging(self) -> list[str]:
        """Return the names of the checkpoints that are being written."""
        return [path.name for path in self.run_dir.glob(".staging-checkpoint-*")]

    def wait_for(self, what: str, condition: Callable[[], Found]) -> Found:
        """Return what `condition` gives once that is true; the run must not end before."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            if self.launcher.poll() is not None:
                raise AssertionError(f"ended with {self.launcher.returncode} before {what}:\n{self.said}")
            if time.monotonic() > deadline_s:
                raise AssertionError(f"waited {PATIENCE_S} s for {what}:\n{self.said}")
            time.sleep(0.002)
        return found

    def wait_for_ranks(self, count: int, *, after_attempt: int | None = None) -> list[psutil.Process]:
        """Return the ranks of a new attempt once all are there."""
        before = self.attempt_before if after_attempt is None else after_attempt

        def all_there() -> list[psutil.Process]:
            ranks = self.ranks() if self.attempt > before else []
            return ranks if len(ranks) == count else []

        return self.wait_for(f"{count} ranks", all_there)

    def wait_for_step(self, step: int) -> None:
        """Wait until this start of the command has recorded `step` or a later one."""
        self.wait_for(
            f"step {step}",
            lambda: self.attempt > self.attempt_before and self.last_step(self.attempt) >= step,
        )

    def vanish(self) -> float:
        """Return the seconds until no process of the run is left, the launcher having been killed; 30 at most."""
        began_s = time.monotonic()
        self.launcher.wait()
        while self.processes() and time.monotonic() < began_s + 30:
            time.sleep(0.02)
        return time.monotonic() - began_s

    def end(self, within_s: float = PATIENCE_S) -> int:
        """Return the exit status of the command, negative for a signal."""
        try:
            return self.launcher.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within_s} s:\n{self.said}") from None


def kill_frozen(
    run: LiveRun, ranks: Sequence[psutil.Process], *, only_mid_save: bool, launcher: bool = False
) -> bool | None:
    """SIGKILL all ranks, or the launcher, at one moment; return whether that was in the middle of a save.

    The ranks are stopped first, so that what is seen on disk is what they left. With `only_mid_save` they go on
    unharmed, and None is returned, when the moment turns out to be another.
    """
    for process in ranks:
        process.send_signal(signal.SIGSTOP)
    mid_save = bool(run.staging())
    if only_mid_save and not mid_save:
        for process in ranks:
            process.send_signal(signal.SIGCONT)
        return None
    if launcher:
        run.launcher.kill()
        return mid_save
    for process in ranks:
        process.send_signal(signal.SIGKILL)
    return mid_save


def ledger(run_dir: Path) -> list[dict[str, Any]]:
    """Return one row of figures a step, in the order of steps; of a step done twice the last attempt's counts."""
    rows = {row["step"]: row for row in read(run_dir / "metrics.jsonl") if row["kind"] == "train"}
    return [rows[step] for step in sorted(rows)]

"""A user's own script on one machine: `python -m trainwright.launch.own_script.local SCRIPT_JSON`.

It starts the launcher that script.json names, and passes a request to stop on to the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode
from trainwright.launch.own_script.starting import ScriptStart, launcher_command
from trainwright.launch.processes import STOP_SIGNALS
from trainwright.launch.supervision import POLL_S, StopAsked
from trainwright.runs.kill_domain import die_with_launcher

GRACE_S = 120.0
"""How long a script may take to save and end, once asked to stop; then it is killed."""


def run_here(script_json: Path) -> ExitCode:
    """Run an attempt to its end; STOPPED where it was asked to stop, however the script then ended."""
    start = ScriptStart.read(script_json)
    attempt_dir = script_json.parent
    stop = StopAsked(most=1)
    with stop.listening():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        launcher = _started(launcher_command(start, script_json))
        asked: set[int] = set()
        deadline_s = float("inf")
        while launcher.poll() is None:
            if stop.times:
                deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
                _ask_to_stop(attempt_dir, asked)
            if time.monotonic() > deadline_s:
                launcher.kill()
            time.sleep(POLL_S)
    codes = [note["exit_code"] for note in _notes(attempt_dir, "ended")]
    if stop.times or (codes and all(code == ExitCode.STOPPED for code in codes)):
        return ExitCode.STOPPED
    return ExitCode.DONE if launcher.returncode == 0 else ExitCode.FAILED


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if key != "TRAINWRIGHT_LAUNCHER_PID"}
    bound = die_with_launcher if sys.platform == "linux" else None
    os.environ.pop("TRAINWRIGHT_LAUNCHER_PID", None)  # what is started here has this process for its launcher
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=bound)


def _ask_to_stop(attempt_dir: Path, asked: set[int]) -> None:
    """Ask each rank to stop that was not asked yet, those that start only now too.

    Not their launcher, which would give them 30 s and then kill them.
    """
    for note in _notes(attempt_dir, "started"):
        if note["pid"] not in asked:
            asked.add(note["pid"])
            with suppress(ProcessLookupError):
                os.kill(note["pid"], signal.SIGTERM)


def _notes(attempt_dir: Path, what: str) -> Iterator[dict[str, Any]]:
    """Yield what the ranks wrote down."""
    for path in sorted(attempt_dir.glob(f"rank_*.{what}.json")):
        with suppress(ValueError):  # half written: its rank is being killed
            yield json.loads(path.read_text())


def main(arguments: list[str]) -> int:
    """Run the attempt of the file on the command line, and return the exit code."""
    die_with_launcher()
    return run_here(Path(arguments[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

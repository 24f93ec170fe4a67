"""One rank of a user's own script, as its launcher starts it: `python -m trainwright.launch.own_script.rank FILE`.

The script runs as a child of this process, unmodified. Its output goes to the rank's log, signals are passed on to it,
and how it began and ended is written down, so that the run can tell cause from consequence. Where the script does not
report its metrics itself, the first rank reads them from the log as it grows.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from trainwright.hardware.utilization import utilization_pct
from trainwright.launch.own_script.log_reader import LogMetrics
from trainwright.launch.own_script.starting import BY_HAND, ScriptStart
from trainwright.launch.processes import STOP_SIGNALS
from trainwright.out_of_memory import says_out_of_memory
from trainwright.runs.folder import RunFolder
from trainwright.runs.kill_domain import die_with_launcher
from trainwright.runs.records import append

PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
POLL_S = 0.1
GPUS_EVERY_S = 2.0
LAST_BYTES = 8192
"""How much of the log's end is kept as what the script said last."""


def main(script_json: Path) -> int:
    """Run the script as this rank and return its exit status; end by the signal that ended it."""
    start = ScriptStart.read(script_json)
    folder = start.folder
    folder.output_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if start.attempt == BY_HAND:
        os.chdir(start.working_directory)
        os.execvpe(start.command[0], start.command, os.environ | start.environment)
    if sys.platform == "linux":
        die_with_launcher()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folder.require_fence(start.attempt)
    log = folder.rank_log(start.attempt, rank)
    if rank == 0:
        log.write_text("".join(f"{line}\n" for line in environment_lines(start.device, ranks)))
    asked: list[int] = []
    try:
        script = _start(start, log, asked)
    except OSError as error:
        text = f"the script does not start: {error}"
        _note(start, rank, "error", {"exit_code": 127, "time_s": time.time(), "text": text})
        print(text, file=sys.stderr)
        return 127
    _note(start, rank, "started", {"pid": os.getpid(), "host": socket.gethostname()})
    # In a thread of its own: should the reading of a log fail, the training does not.
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(start, rank, ended), daemon=True)
    watcher.start()
    code = script.wait()
    ended.set()
    watcher.join()
    if code:
        last_words = log.read_bytes()[-LAST_BYTES:].decode("utf-8", "replace")
        out_of_memory_in = "training" if says_out_of_memory(last_words) else None
        said = {"text": last_words, "out_of_memory_in": out_of_memory_in}
        _note(start, rank, "error", {"exit_code": code, "time_s": time.time(), **said})
    _note(start, rank, "ended", {"exit_code": code, "time_s": time.time()})
    if set(asked) & set(STOP_SIGNALS):
        return _stopped(folder, start.attempt, rank)
    if code < 0:
        _die_alike(-code)
    return code


def _stopped(folder: RunFolder, attempt: int, rank: int) -> int:
    """Note the stop, and return 0: torchrun would hurry the other ranks if one returned anything else."""
    # Once more asked while the interpreter shuts down, its handlers gone, this process would die of it.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    if rank == 0:
        with suppress(OSError):
            append(folder.events_jsonl, {"event": "stopped", "attempt": attempt})
    return 0


def _die_alike(number: int) -> None:
    """End by the signal that ended the script, so that the launcher sees the same."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _watch(start: ScriptStart, rank: int, ended: threading.Event) -> None:
    """Look at the log of the first rank, and at the GPUs of each node, until the script has ended."""
    folder = start.folder
    with ExitStack() as watching:
        watches = []
        if rank == 0:
            watches.append(watching.enter_context(LogMetrics(folder, start.attempt)).follow)
        if start.device == "cuda" and os.environ.get("LOCAL_RANK", "0") == "0":
            watches.append(GpuUse(folder.attempt_dir(start.attempt) / f"gpus_of_rank_{rank}.json").sample)
        while watches and not ended.wait(POLL_S):
            for watch in watches:
                watch()


def environment_lines(device: str, ranks: int) -> list[str]:
    """Return the three lines that S1-23 asks for, of the processes that the launcher really started."""
    several = ranks > 1
    kind = {"cuda": "MULTI_GPU" if several else "GPU", "cpu": "MULTI_CPU" if several else "CPU", "mps": "MPS"}
    return [
        f"Distributed environment: {kind[device]}",
        f"Number of processes: {ranks}",
        f"Number of GPUs: {ranks if device == 'cuda' else int(device == 'mps')}",
    ]


def _start(start: ScriptStart, log: Path, asked: list[int]) -> subprocess.Popen[bytes]:
    """Start the script; signals that come before it is there wait for it, and those passed on are in `asked`."""
    attempt = {"TRAINWRIGHT_RUN_DIR": start.run_dir, "TRAINWRIGHT_ATTEMPT": str(start.attempt)}
    environment = os.environ | start.environment | attempt
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    with log.open("ab") as output:
        script = subprocess.Popen(
            start.command,
            cwd=start.working_directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_begin,
        )

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        script.send_signal(number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    return script


def _begin() -> None:
    """Run in the script's process before it is the script."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    if sys.platform == "linux":
        die_with_launcher()


def _note(start: ScriptStart, rank: int, what: str, content: dict[str, Any]) -> None:
    path = start.folder.attempt_dir(start.attempt) / f"rank_{rank}.{what}.json"
    with suppress(OSError):  # on a full disk the exit status alone has to say it
        path.write_text(json.dumps({"rank": rank, **content}))


class GpuUse:
    """Samples the GPUs that this process may use, and keeps in a file how busy each was at most, as NVML says."""

    def __init__(self, path: Path) -> None:
        self._path, self._next_s = path, 0.0
        self._names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        self._highest: dict[str, int | None] = dict.fromkeys(self._names)

    def sample(self) -> None:
        """Look at the GPUs, if it is time."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + GPUS_EVERY_S
        before = dict(self._highest)
        for name, seen in utilization_pct(self._names).items():
            self._highest[name] = max(seen, self._highest[name] or 0)
        if self._highest != before or not self._path.exists():
            with suppress(OSError):
                self._path.write_text(json.dumps(self._highest))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

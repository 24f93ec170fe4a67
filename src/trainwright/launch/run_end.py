"""How a run ended, told once: on the console, and to the command and the webhook that the job's alerts name.

These are told by a process of its own (`trainwright.watch.run_end`), which outlives this one: where the launcher is
killed before it can say how the run ended, its end of the pipe between them closes, and the process says that.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainwright.errors import ExitCode, UserError
from trainwright.job.schema import Job
from trainwright.launch.failures import telling_line
from trainwright.launch.run_output import tell
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import read

ARRIVAL_S: Final = 25.0
"""How long the launcher waits for the message to arrive: the command and the webhook may take 10 s each."""


@dataclass
class RunEnd:
    """How a run ended: `code` is what the launcher ends with, None where there is nothing to tell.

    `before` is the attempt before this launcher's first; `why` says why the run failed where no rank did.
    """

    folder: RunFolder
    before: int
    code: ExitCode | None = None
    why: str | None = None

    def message(self) -> dict[str, Any] | None:
        """Return the message in the form of an alert, None where there is nothing to tell."""
        if self.code is None:
            return None
        folder, name = self.folder, self.folder.path.name
        saved = folder.checkpoints()
        step = saved[0][0] if saved else None
        where = "" if step is None else f", saved at step {step:,}"
        if self.code is ExitCode.DONE:
            rule, what = "run_finished", f"run {name} finished"
            advice = f"trainwright report {folder.path}"
        elif self.code is ExitCode.STOPPED:
            rule, what = "run_stopped", f"run {name} was stopped{where}"
            advice = "the same command goes on from there"
        else:
            rule, what = "run_failed", f"run {name} failed: {self.why or self._cause()}"
            advice = f"trainwright doctor {folder.path}"
        now_s = time.time()
        return {
            "time_s": now_s,
            "state": "fired",
            "rule": rule,
            "subject": name,
            "severity": "warning" if rule == "run_failed" else "note",
            "what": what,
            "advice": advice,
            "figures": {"exit_code": int(self.code), "step": step},
            "threshold": {},
            "since_s": now_s,
            "node": socket.gethostname(),
            "attempt": folder.attempt or None,
        }

    def _cause(self) -> str:
        attempt = self.folder.attempt
        if attempt == self.before:
            return f"exit code {self.code:d}, before its ranks began"
        events = [
            e for e in read(self.folder.events_jsonl) if (e.get("event"), e.get("attempt")) == ("failed", attempt)
        ]
        if not events:
            return f"exit code {self.code:d}, logs in {self.folder.attempt_dir(attempt)}"
        rank, code, text = (events[-1].get(key) for key in ("rank", "exit_code", "text"))
        if isinstance(code, int) and code < 0:
            return f"rank {rank} was ended by {signal.Signals(-code).name}"
        return f"rank {rank}: {telling_line(str(text or '')) or f'exit code {code}'}"


@contextmanager
def telling_end(folder: RunFolder, job: Job) -> Iterator[RunEnd]:
    """Tell how the run ended once the caller is done with it, also where it is ended by an error or killed."""
    end, log = RunEnd(folder, folder.attempt), folder.logs_dir / "run_end.log"
    has_channel = job.alerts.command is not None or job.alerts.webhook_env is not None
    teller = _start_teller(folder, job, log) if has_channel else None
    try:
        yield end
    except UserError as error:
        # Said on the console by the command itself, with what to do.
        end.code, end.why = error.exit_code, error.message
        _hand_over(teller, end.message(), log)
        raise
    except BaseException:
        # The pipe closes without a word, as that of a launcher that was killed.
        if teller is not None and teller.stdin is not None:
            teller.stdin.close()
        raise
    message = end.message()
    if message is not None:
        # The cause stands above this line already.
        tell(f"{message['what'].partition(': ')[0]}: {message['advice']}")
    _hand_over(teller, message, log)


def _start_teller(folder: RunFolder, job: Job, log: Path) -> subprocess.Popen[bytes] | None:
    """Start what tells the end; one that cannot start harms nothing else."""
    with suppress(OSError):
        log.parent.mkdir(mode=0o700, exist_ok=True)
        with log.open("wb") as output:
            teller = subprocess.Popen(
                [sys.executable, "-m", "trainwright.watch.run_end", str(folder.path), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert teller.stdin is not None
        teller.stdin.write(job.alerts.model_dump_json().encode() + b"\n")
        teller.stdin.flush()
        return teller
    return None


def _hand_over(teller: subprocess.Popen[bytes] | None, message: dict[str, Any] | None, log: Path) -> None:
    if teller is None:
        return
    with suppress(OSError, subprocess.TimeoutExpired):
        teller.communicate(json.dumps(message).encode(), ARRIVAL_S)
    with suppress(OSError):
        for line in log.read_text(errors="replace").splitlines():
            tell(line)

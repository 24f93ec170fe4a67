"""Which rank failed first and why: the cause, told apart from what it did to the others."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.out_of_memory import Doing, says_out_of_memory

# What a rank says when it is another one that went away (measured on gloo; NCCL's own wording).
COLLATERAL = re.compile(
    r"closed by peer|reset by peer|Timed out waiting|remote process exited|Broken pipe|connectFullMesh"
    r"|Socket Timeout|ncclRemoteError|NCCL communicator was aborted|Connection refused",
    re.IGNORECASE,
)
LAST_BYTES = 4096
"""How far back the end of a log is looked at."""


@dataclass(frozen=True)
class Failure:
    """The end of one rank: its exit status, or the signal that killed it, and what it wrote down.

    `out_of_memory_in` says at what its memory ran out, None where it did not. `killed_by_kernel`: the signal was the
    kernel's, for want of host memory.
    """

    rank: int
    exit_code: int
    signal_name: str | None
    time_s: float
    text: str
    out_of_memory_in: Doing | None = None
    killed_by_kernel: bool = False

    @property
    def is_collateral(self) -> bool:
        """Whether this rank only fell because another did."""
        if self.out_of_memory_in is not None:
            return False
        return self.signal_name == "SIGABRT" or bool(COLLATERAL.search(self.text))

    @property
    def killed(self) -> bool:
        """Whether a signal from outside or a crash of the interpreter ended it."""
        return self.signal_name is not None

    def describe(self) -> str:
        """Return the cause in a few lines, the rank named."""
        if self.killed_by_kernel:
            return (
                f"rank {self.rank} was ended by {self.signal_name}: the kernel had no host memory left for it "
                "(its count of such kills rose)"
            )
        if self.signal_name is not None:
            return f"rank {self.rank} was ended by {self.signal_name}"
        if self.is_collateral:
            return f"no rank says why; rank {self.rank} only saw that another was gone:\n{self.text.rstrip()}"
        if self.text:
            return f"rank {self.rank} failed:\n{self.text.rstrip()}"
        return f"rank {self.rank} ended with exit status {self.exit_code} and left no word"


def read_failures(attempt_dir: Path, exit_codes: Sequence[int | None], killed: Collection[int]) -> list[Failure]:
    """Return the failures of an attempt; ranks in `killed` fell by the launcher's own hand and do not count."""
    failures = []
    for rank, code in enumerate(exit_codes):
        if code in (None, 0, 75) or rank in killed:
            continue
        assert code is not None
        name = signal.Signals(-code).name if code < 0 else None
        written = _last_words(attempt_dir / f"rank_{rank}.error.json")
        if not written and name != "SIGKILL":
            written = _of_its_log(attempt_dir / f"rank_{rank}.log")
        failures.append(
            Failure(
                rank,
                code,
                name,
                written.get("time_s", float("inf")),
                written.get("text", ""),
                out_of_memory_in=written.get("out_of_memory_in"),
            )
        )
    return failures


def _last_words(path: Path) -> dict[str, Any]:
    """Return what a rank wrote of its end: nothing, if it was killed before or while it did."""
    try:
        words: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return words


def _of_its_log(path: Path) -> dict[str, Any]:
    """Return what the log's end says where a library ended the process and Python never came to speak.

    bitsandbytes leaves through exit() and NCCL's watchdog through abort(), both after a line on what failed.
    """
    try:
        last_lines = path.read_bytes()[-LAST_BYTES:].decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return {}
    telling = [line for line in last_lines if says_out_of_memory(line)]
    return {"out_of_memory_in": "training", "text": telling[-1]} if telling else {}


def cause_of(failures: Sequence[Failure]) -> Failure:
    """Return the failure that the others follow from: not collateral before collateral, then the earliest.

    A signal has no time of its own, as nothing was written down; it comes before an exception, for a rank that was
    killed makes the others raise and not the other way round.
    """
    return min(failures, key=lambda failure: (failure.is_collateral, not failure.killed, failure.time_s, failure.rank))


def telling_line(text: str) -> str | None:
    """Return the line of a rank's last words that says why: our own error's first, an exception's last."""
    lines = text.strip().splitlines()
    return next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else None)

"""What a save is tested with: a child that saves, strace around it, and a small disk of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import saving_run

CHILD = [sys.executable, "-S", "-E", "-B", saving_run.__file__]


@dataclass(frozen=True)
class Strace:
    """Runs saving_run.py under strace."""

    path: str
    log: Path

    def count(self, syscalls: str, *arguments: object) -> Counter[str]:
        """Return how often an undisturbed run makes each of the system calls."""
        self.run(syscalls, "", *arguments, check=True)
        return Counter(re.findall(r"^(?:\d+ +)?(\w+)\(", self.log.read_text(), re.MULTILINE))

    def run(
        self, syscalls: str, fault: str, *arguments: object, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run it with a fault (`signal=KILL:when=3`) at the calls of a kind; without a fault they are only logged."""
        inject = ["-e", f"inject={syscalls}:{fault}"] if fault else []
        options = ["-f", "-y", "-qq", "-o", str(self.log), "-e", f"trace={syscalls}", *inject]
        command = [self.path, *options, *CHILD, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=check, timeout=60)


@dataclass(frozen=True)
class SmallDisk:
    """A tmpfs of its own, so that a full or read-only disk is a real one."""

    path: Path

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True)

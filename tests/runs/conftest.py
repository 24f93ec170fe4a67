from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import saving_run

from trainwright.runs import RunFolder

CHILD = [sys.executable, "-S", "-E", "-B", saving_run.__file__]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder in which nothing has been saved yet."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


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


@pytest.fixture
def strace(tmp_path: Path) -> Strace:
    """strace, which decides at which system call a process dies or an error comes back."""
    if sys.platform != "linux":
        pytest.skip("strace exists only on Linux")
    path = shutil.which("strace")
    if path is None:
        pytest.fail("these tests need strace: apt-get install strace")
    return Strace(path, tmp_path / "strace.log")


@dataclass(frozen=True)
class SmallDisk:
    """A tmpfs of its own, so that a full or read-only disk is a real one."""

    path: Path

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], SmallDisk] | None]:
    """Makes a disk of so many KiB; None where this user may not mount one."""
    mounted: list[Path] = []

    def make(size_kib: int) -> SmallDisk:
        path = tmp_path / "disk"
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(path)], check=True)
        mounted.append(path)
        return SmallDisk(path)

    probe = tmp_path / "probe"
    probe.mkdir()
    able = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(probe)], capture_output=True)
    if able.returncode == 0:
        subprocess.run(["umount", str(probe)], check=True)
    yield make if able.returncode == 0 else None
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)

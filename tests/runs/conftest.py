from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty_saves import SmallDisk, Strace

from trainwright.runs import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder in which nothing has been saved yet."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


@pytest.fixture
def strace(tmp_path: Path) -> Strace:
    """strace, which decides at which system call a process dies or an error comes back."""
    if sys.platform != "linux":
        pytest.skip("strace exists only on Linux")
    path = shutil.which("strace")
    if path is None:
        pytest.fail("these tests need strace: apt-get install strace")
    return Strace(path, tmp_path / "strace.log")


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

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import saving_run
from faulty_saves import CHILD

from trainwright.errors import ExitCode, UserError
from trainwright.runs import RunFolder, RunLock


def start(run: Path) -> subprocess.Popen[str]:
    """Start a process that locks the run and holds it until its stdin closes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*CHILD, str(run), "start"], text=True, **pipes)


def test_of_two_starts_exactly_one_proceeds(tmp_path: Path) -> None:
    """C15: 20 tries with 0 to 500 ms between the starts, on folders that neither has seen before."""
    random_s = random.Random(15)
    for delay_s in sorted(random_s.uniform(0, 0.5) for _ in range(20)):
        run = tmp_path / f"run_{delay_s:.6f}"
        both = [start(run)]
        time.sleep(delay_s)
        both.append(start(run))
        try:
            told = [process.stdout.readline() if process.stdout else "" for process in both]
            assert sorted(told) == ["", "attempt 1\n"], f"{told} at {delay_s} s"
            winner, loser = both if told[0] else both[::-1]
            started_s = time.monotonic()
            _, error = loser.communicate(timeout=10)
            assert time.monotonic() - started_s < 5
            assert loser.returncode == ExitCode.USAGE, error
            assert f"pid {winner.pid} on " in error and "Traceback" not in error, f"{error} at {delay_s} s"
            assert RunFolder(run).holds_fence(1)
            winner.communicate("", timeout=10)
            assert winner.returncode == 0
        finally:
            for process in both:
                process.kill()
                process.communicate()


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    """C15: no stale lock, although its text is still there; a later contender is told the new holder."""
    run = tmp_path / "run"
    holder = start(run)
    assert holder.stdout is not None and holder.stdout.readline() == "attempt 1\n"
    holder.kill()
    holder.communicate()
    started_s = time.monotonic()
    with RunLock(RunFolder(run)):
        assert time.monotonic() - started_s < 5
        with pytest.raises(UserError, match=f"pid {os.getpid()} on "), RunLock(RunFolder(run)):
            pytest.fail("locked twice")


def test_the_lock_ends_with_its_holder_although_a_child_lives_on(tmp_path: Path) -> None:
    """C15, S09: an orphaned worker does not keep the run locked."""
    run = tmp_path / "run"
    source = Path(saving_run.__file__).resolve().parents[2] / "src"
    script = (
        f"import sys, subprocess; sys.path.insert(0, {str(source)!r})\n"
        "from trainwright.runs import RunFolder, RunLock\n"
        f"folder = RunFolder({str(run)!r}); folder.create()\n"
        "lock = RunLock(folder).__enter__()\n"
        "child = subprocess.Popen(['sleep', '60'], close_fds=False)\n"
        "print(child.pid, flush=True); child.wait()\n"
    )
    holder = subprocess.Popen([sys.executable, "-S", "-E", "-c", script], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(UserError, match=f"pid {holder.pid} on "), RunLock(RunFolder(run)):
            pytest.fail("locked twice")
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with RunLock(RunFolder(run)):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_the_lock_can_be_taken_again_after_it_was_given_back(folder: RunFolder) -> None:
    """C15: also after an error inside."""
    with pytest.raises(ZeroDivisionError), RunLock(folder):
        raise ZeroDivisionError
    with RunLock(folder):
        pass
    assert folder.lock_file.stat().st_mode & 0o777 == 0o600


def test_a_link_in_place_of_the_lock_is_not_followed(folder: RunFolder, tmp_path: Path) -> None:
    """X04"""
    (tmp_path / "victim").write_text("precious")
    folder.lock_file.symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match="cannot be locked"), RunLock(folder):
        pytest.fail("followed")
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_contender_is_not_told_the_name_of_a_dead_holder(folder: RunFolder) -> None:
    """C15: the new holder has the lock and has not yet written over what a killed one left."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    with RunLock(folder):
        right = folder.lock_file.read_text()
        folder.lock_file.write_text(right.replace(f'"pid": {os.getpid()}', f'"pid": {gone.pid}'))
        late = threading.Timer(0.1, folder.lock_file.write_text, [right])
        late.start()
        with pytest.raises(UserError, match=f"pid {os.getpid()} on "), RunLock(folder):
            pytest.fail("locked twice")
        late.join()


def test_the_lock_of_a_lost_machine_is_taken_over_and_its_holder_cannot_give_it_back(folder: RunFolder) -> None:
    """C15: what still lives there keeps the old file, of which nobody hears any more; a third one is kept out."""
    lost = RunLock(folder)
    lost.__enter__()
    with RunLock(folder, is_gone=lambda holder: holder["pid"] == os.getpid()):
        lost.__exit__(None, None, None)
        with pytest.raises(UserError, match=f"pid {os.getpid()} on "), RunLock(folder):
            pytest.fail("locked twice")
    with RunLock(folder):
        pass

"""What is looked up of ranks that stand still: stacks, flight records, and what the kernel says of real processes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from trainwright.launch.hangs.evidence import answer_other_machine, look
from trainwright.launch.hangs.fault import find_fault
from trainwright.launch.hangs.flight import read_flight_record
from trainwright.launch.hangs.rank_sections import RankSection
from trainwright.launch.hangs.stacks import feeding_thread, main_thread, threads_in, worker_thread
from trainwright.runs.folder import RunFolder

STACK = """\
Thread 0x00007f0a1 (most recent call first):
  File "/home/me/task.py", line 12 in collate
  File "/usr/lib/python3.11/site-packages/trainwright/train/feeding.py", line 41 in _collate
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0b2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/opt/trainwright/train/feeding.py", line 30 in batches
  File "/opt/trainwright/train/__main__.py", line 70 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def test_stacks_are_read_by_thread() -> None:
    threads = threads_in(STACK.splitlines())
    main, feeding = main_thread(threads), feeding_thread(threads)
    assert main is not None and main.stands_at == "threading.py:320 in wait"
    assert feeding is not None and feeding.stands_at == "task.py:12 in collate"
    assert main_thread(threads_in(["no stack at all"])) is None


def test_a_worker_that_a_thread_has_forked_stands_where_its_own_code_is() -> None:
    """A DataLoader's worker has no `<module>` in its stack if it was made on another thread than the main one."""
    helper = """\
Thread 0x00007f0c3 (most recent call first):
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 231 in _feed
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

"""
    forked = STACK.split("\n\n")[0].replace("Thread", "Current thread").replace("collate", "__getitem__")
    worker = worker_thread(threads_in((helper + forked).splitlines()))
    assert worker is not None and worker.stands_at == "task.py:12 in __getitem__"


def test_a_flight_record_of_gloo_is_read(tmp_path: Path) -> None:
    """As torch 2.13 writes it, shortened."""
    entry = {"input_sizes": [[8]], "is_p2p": False, "process_group": ["0", "default_pg"], "state": "scheduled"}
    entries = [
        entry | {"collective_seq_id": n, "profiling_name": name}
        for n, name in ((3, "gloo:all_reduce"), (4, "gloo:broadcast"))
    ]
    path = tmp_path / "fr_rank_1.json"
    path.write_text(json.dumps({"rank": 1, "version": "2.10", "entries": entries}))
    record = read_flight_record(path)
    assert record is not None and record.rank == 1 and str(record.last) == "gloo:broadcast [[8]]"
    path.write_text("{")
    assert read_flight_record(path) is None


PROGRAM = """\
import faulthandler, multiprocessing, pathlib, signal, subprocess, sys, time
faulthandler.register(signal.SIGUSR1, open(sys.argv[1], "ab", buffering=0))

def __getitem__():
    time.sleep(1000)

if __name__ == "__main__":
    worker = multiprocessing.get_context("fork").Process(target=__getitem__, daemon=True)
    worker.start()
    deaf = subprocess.Popen(["sleep", "1000"])
    pathlib.Path(sys.argv[2]).touch()
    worker.join()
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run folder with an attempt begun."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.start_attempt()
    folder.ranks_dir.mkdir()
    return folder


@contextmanager
def rank_process(folder: RunFolder) -> Iterator[psutil.Process]:
    """A process like a rank's, without torch: it waits for a worker that never comes back."""
    program = folder.path / "trainwright_rank.py"
    program.write_text(PROGRAM)
    ready = folder.path / "ready"
    with subprocess.Popen([sys.executable, program, folder.stack_file(1, 0), ready]) as started:
        rank = psutil.Process(started.pid)
        try:
            deadline_s = time.monotonic() + 120
            while not ready.exists():
                assert started.poll() is None and time.monotonic() < deadline_s
                time.sleep(0.05)
            yield rank
        finally:
            for process in [*rank.children(recursive=True), rank]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="the state of processes is read from /proc")
def test_a_stuck_worker_and_a_stopped_process_are_seen_and_nothing_dies_of_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H02, H06: stacks of the rank and of a forked worker; SIGUSR1 never goes to a process that would die of it."""
    monkeypatch.setattr("trainwright.launch.hangs.evidence.ANSWER_S", 0.5)  # no heartbeat thread will ever answer
    with rank_process(folder) as rank:
        node = socket.gethostname()
        here = RankSection(rank=0, section="data", there_s=9, limit_s=8, done=4, pid=rank.pid, node=node)
        (found,) = look(folder, 1, [here]).values()
        assert found.process is not None and found.process.state == "S"
        assert found.process.stands_at is not None and "trainwright_rank.py:12 in <module>" in found.process.stands_at
        (stuck,) = [child for child in found.children if child.stands_at]
        assert stuck.stands_at == "trainwright_rank.py:5 in __getitem__" and len(found.children) == 2
        assert all(child.is_running() and child.status() != "zombie" for child in rank.children())
        hang = find_fault([here], {0: found})
        assert hang.kind == "data-starvation/stuck" and f"pid {stuck.pid}" in hang.why

        rank.send_signal(signal.SIGSTOP)
        while rank.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        (found,) = look(folder, 1, [here]).values()
        assert found.process is not None and (found.process.state, found.process.stands_at) == ("T", None)
        assert find_fault([here], {0: found}).kind == "hang/stopped"


@pytest.mark.skipif(sys.platform != "linux", reason="the state of processes is read from /proc")
def test_a_launcher_on_another_machine_is_answered_once(folder: RunFolder) -> None:
    """Several nodes: each node's launcher looks at its own ranks, when the first one's asks on the shared disk."""
    with rank_process(folder) as rank:
        ranks = [
            {"rank": 0, "pid": rank.pid, "node": socket.gethostname(), "section": "data"},
            {"rank": 1, "pid": rank.pid, "node": "elsewhere", "section": "data"},
        ]
        assert answer_other_machine(folder, 1, 0) == 0, "nobody asks"
        folder.dump_request(1).write_text(json.dumps({"by": "login-node", "ranks": ranks}))
        answered_ns = answer_other_machine(folder, 1, 0)
        assert json.loads(folder.process_json(1, 0).read_text())["process"]["pid"] == rank.pid
        assert not folder.process_json(1, 1).exists()
        folder.process_json(1, 0).unlink()
        assert answer_other_machine(folder, 1, answered_ns) == answered_ns
        assert not folder.process_json(1, 0).exists()

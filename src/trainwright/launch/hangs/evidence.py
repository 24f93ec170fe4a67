"""What is looked up of each rank while the run stands still: its stacks, collectives and processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from trainwright.launch.hangs.flight import FlightRecord, read_flight_record
from trainwright.launch.hangs.rank_sections import RankSection
from trainwright.launch.hangs.stacks import Thread, feeding_thread, main_thread, threads_in, worker_thread
from trainwright.runs.folder import RunFolder
from trainwright.runs.writing import read_json, write_json_atomic

ANSWER_S: Final = 10.0
"""How long ranks may take to answer; a heartbeat looks once a second, on a busy machine somewhat later."""
STACK_S: Final = 3.0
MOST_CHILDREN: Final = 16
STOPPED: Final = ("T", "t")


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """A process as the kernel shows it (proc(5)), and the line of the program that it stands at, if it tells."""

    pid: int
    name: str
    state: str | None = None
    waits_in: str | None = None
    stands_at: str | None = None

    def __str__(self) -> str:
        said = [f"state {self.state}"] if self.state else []
        said += [f"waits in {self.waits_in}"] if self.waits_in else []
        said += [f"stands at {self.stands_at}"] if self.stands_at else []
        return f"pid {self.pid} ({self.name}): {', '.join(said) or 'gone'}"


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """All that was found of one rank; None is "it did not answer"."""

    process: ProcessState | None = None
    feeds_at: str | None = None
    """Where the thread that makes its batches stands."""
    in_collective: bool = False
    children: tuple[ProcessState, ...] = ()
    flight: FlightRecord | None = None


def look(folder: RunFolder, attempt: int, places: Collection[RankSection]) -> dict[int, RankEvidence]:
    """Ask every rank where it stands, and return what came within some seconds; nothing is harmed by it.

    The ranks of other machines are looked at by their node's launcher, which sees the request on the shared disk.

    Raises:
        OSError: the disk takes no files; then the heartbeats may be old for no other reason.
    """
    request = folder.dump_request(attempt)
    asked = [place for place in places if not place.ended and place.pid is not None]
    write_json_atomic(request, {"by": socket.gethostname(), "ranks": [_asked(place) for place in asked]})
    answer_request(folder, attempt)
    since_ns = request.stat().st_mtime_ns
    wanted = [folder.process_json(attempt, place.rank) for place in asked]
    wanted += [folder.flight_record(attempt, place.rank) for place in asked if not place.silent]
    _wait_until(lambda: all(_is_newer(path, since_ns) for path in wanted), ANSWER_S)
    return {place.rank: _answer(folder, attempt, place.rank, since_ns) for place in places}


def answer_request(folder: RunFolder, attempt: int) -> None:
    """Write down what the processes of this machine's ranks do, of those that are asked about."""
    asked = read_json(folder.dump_request(attempt))["ranks"]
    here = [rank for rank in asked if rank["node"] == socket.gethostname() and _is_ours(rank["pid"])]
    stacks = {rank["rank"]: folder.stack_file(attempt, rank["rank"]) for rank in here}
    threads = _dump([(rank["pid"], stacks[rank["rank"]]) for rank in here])
    for rank in here:
        found, children = threads.get(rank["pid"], []), _children(rank["pid"])
        if rank["section"] == "data":
            children = [_with_stack(child, stacks[rank["rank"]]) for child in children]
        main, feeding = main_thread(found), feeding_thread(found)
        record = {
            "process": asdict(_process(rank["pid"], main)),
            "feeds_at": feeding and feeding.stands_at,
            "in_collective": main is not None and main.in_collective,
            "children": [asdict(child) for child in children],
        }
        write_json_atomic(folder.process_json(attempt, rank["rank"]), record)


def answer_other_machine(folder: RunFolder, attempt: int, answered_ns: int) -> int:
    """Answer what a launcher on another machine asks, unless that was done; return which request was answered."""
    request = folder.dump_request(attempt)
    try:
        asked_ns = request.stat().st_mtime_ns
        if asked_ns != answered_ns and read_json(request)["by"] != socket.gethostname():
            answer_request(folder, attempt)
    except OSError:  # mostly: there is none
        return answered_ns
    return asked_ns


def _asked(place: RankSection) -> dict[str, Any]:
    return {"rank": place.rank, "pid": place.pid, "node": place.node, "section": place.section}


def _answer(folder: RunFolder, attempt: int, rank: int, since_ns: int) -> RankEvidence:
    flight, process = folder.flight_record(attempt, rank), folder.process_json(attempt, rank)
    found: Mapping[str, Any] = read_json(process) if _is_newer(process, since_ns) else {}
    return RankEvidence(
        process=ProcessState(**found["process"]) if found else None,
        feeds_at=found.get("feeds_at"),
        in_collective=bool(found.get("in_collective")),
        children=tuple(ProcessState(**child) for child in found.get("children", ())),
        flight=read_flight_record(flight) if _is_newer(flight, since_ns) else None,
    )


def _is_newer(path: Path, since_ns: int) -> bool:
    try:
        return path.stat().st_mtime_ns >= since_ns
    except OSError:
        return False


def _is_ours(pid: int) -> bool:
    """Whether a process of that number is one of ours: numbers are given again."""
    try:
        return "trainwright" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _dump(processes: Iterable[tuple[int, Path]]) -> dict[int, list[Thread]]:
    """Have all of these write their stacks, and return them by pid."""
    before = {pid: (path, _size(path)) for pid, path in processes if _listens(pid)}
    for pid in before:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    return {pid: _threads_after(path, size) for pid, (path, size) in before.items()}


def _threads_after(path: Path, offset: int) -> list[Thread]:
    """Return the threads that a file got since it had `offset` bytes, once it grows no more."""
    sizes = [offset]

    def is_written() -> bool:
        sizes.append(_size(path))
        return sizes[-1] > offset and sizes[-1] == sizes[-2]

    _wait_until(is_written, STACK_S)
    with suppress(OSError), path.open("rb") as file:
        file.seek(offset)
        return threads_in(file.read().decode("utf-8", "replace").splitlines())
    return []


def _with_stack(child: ProcessState, stacks: Path) -> ProcessState:
    """Return a worker with its place: forked from its rank, it writes into the same file, so each in its turn."""
    worker = worker_thread(_dump([(child.pid, stacks)]).get(child.pid, []))
    return child if worker is None else _process(child.pid, worker)


def _listens(pid: int) -> bool:
    """Whether SIGUSR1 is handled: any other process dies of it, and a stopped one would not get it."""
    status = _status(pid)
    if status.get("State", "Z")[0] in (*STOPPED, "Z"):
        return False
    return bool(int(status.get("SigCgt", "0"), 16) >> (signal.SIGUSR1 - 1) & 1)


def _process(pid: int, thread: Thread | None) -> ProcessState:
    status = _status(pid)
    waits_in = None
    with suppress(OSError):
        waits_in = Path(f"/proc/{pid}/wchan").read_text().strip("\0\n 0") or None
    return ProcessState(
        pid=pid,
        name=status.get("Name", "gone"),
        state=status["State"][0] if "State" in status else None,
        waits_in=waits_in,
        stands_at=None if thread is None else thread.stands_at,
    )


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _children(pid: int) -> list[ProcessState]:
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [_process(child.pid, None) for child in children[:MOST_CHILDREN]]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _wait_until(happened: Callable[[], bool], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while not happened() and time.monotonic() < deadline_s:
        time.sleep(0.1)

"""Where the time of the tests goes: `make durations`, a plugin for pytest.

Processor seconds are those of the tests' own process and of all that it started and waited for; what runs on by itself
(the daemons of a Slurm cluster) is not among them. They hardly depend on what else the machine does, wall seconds do.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SPENT = "spent"
COSTLIEST_FILES = 30
MEASURED = Path(__file__).with_suffix(".json")
"""The wall seconds of each file as they were last measured; conftest.py has the longest files started first."""


@dataclass
class Spent:
    """What the tests of one file or room took."""

    tests: int = 0
    wall_s: float = 0.0
    processor_s: float = 0.0

    def add(self, other: Spent) -> None:
        """Add what others took."""
        self.tests += other.tests
        self.wall_s += other.wall_s
        self.processor_s += other.processor_s


def _processor_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Remember when a test begins; its fixtures count as its own, those of a file as its first test's."""
    item.stash[_BEGAN] = (time.monotonic(), _processor_s())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Attach what the test took to its last report, which goes from a worker of xdist to the process that prints."""
    try:
        return (yield)
    finally:
        wall_s, processor_s = item.stash[_BEGAN]
        spent = [time.monotonic() - wall_s, _processor_s() - processor_s]
        item.user_properties.append((SPENT, [*spent, os.environ.get("PYTEST_XDIST_WORKER", "the one process")]))


_BEGAN = pytest.StashKey[tuple[float, float]]()


@dataclass
class Durations:
    """What all tests took, as their reports come in."""

    files: dict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    workers_s: dict[str, float] = field(default_factory=dict)
    """When each worker ended its last test, from the start of the session."""
    began_s: float = field(default_factory=time.monotonic)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take up what one test took."""
        for name, value in report.user_properties:
            if name == SPENT and report.when == "teardown":
                wall_s, processor_s, worker = value
                self.files[report.nodeid.split("::")[0]].add(Spent(1, wall_s, processor_s))
                self.workers_s[worker] = time.monotonic() - self.began_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tables, and keep the files' figures for the order of later runs."""
        for line in self._lines():
            terminalreporter.write_line(line)
        files = {file: round(spent.wall_s, 1) for file, spent in sorted(self.files.items())}
        kept = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
        MEASURED.write_text(json.dumps(dict(sorted({**kept, **files}.items())), indent=1) + "\n")

    def _lines(self) -> Iterator[str]:
        rooms: dict[str, Spent] = defaultdict(Spent)
        total = Spent()
        for file, spent in self.files.items():
            rooms[_room(file)].add(spent)
            total.add(spent)
        rooms["all"] = total
        yield from _table("room", rooms, key=lambda name: (name == "all", name))
        costliest = sorted(self.files, key=lambda file: -self.files[file].processor_s)[:COSTLIEST_FILES]
        yield ""
        yield from _table("file", {file: self.files[file] for file in costliest}, key=costliest.index)
        yield ""
        ended = ", ".join(f"{worker} after {end_s:.0f} s" for worker, end_s in sorted(self.workers_s.items()))
        yield f"The last test ended in {ended}."


def _room(file: str) -> str:
    parts = Path(file).parts
    return parts[1] if len(parts) > 2 else "the documentation"


def _table(head: str, rows: dict[str, Spent], key: Callable[[str], object]) -> Iterator[str]:
    yield f"| {head} | tests | wall s | processor s |"
    yield "| --- | ---: | ---: | ---: |"
    for name in sorted(rows, key=key):  # type: ignore[arg-type]
        spent = rows[name]
        yield f"| {name} | {spent.tests:,} | {spent.wall_s:.0f} | {spent.processor_s:.0f} |"


def pytest_configure(config: pytest.Config) -> None:
    """Collect in the process that prints; a worker of xdist only measures."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())

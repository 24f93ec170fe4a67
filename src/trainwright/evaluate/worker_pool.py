"""The workers of one run and their queue: who is ready gets the next questions, so that a slow one takes fewer."""

from __future__ import annotations

import math
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.results import Key
from trainwright.evaluate.worker_protocol import Wire, question_message
from trainwright.launch.processes import Processes
from trainwright.launch.run_output import tell

POLL_S = 0.2
WORKER_MODULE = "trainwright.evaluate.workers.serve"


@dataclass
class Queue:
    """The questions that nobody has answered: those that wait, and those that a worker holds."""

    waiting: deque[Key]
    held: dict[int, list[Key]] = field(default_factory=dict)

    def take(self, worker: int, room: int, workers: int) -> list[Key]:
        """Give a worker at most `room` questions, and never more than its share of what is left."""
        count = min(room, math.ceil(len(self.waiting) / workers))
        questions = [self.waiting.popleft() for _ in range(count)]
        self.held.setdefault(worker, []).extend(questions)
        return questions

    def done(self, worker: int, key: Key) -> None:
        """Note that a question is answered."""
        self.held[worker].remove(key)

    def give_back(self, worker: int) -> int:
        """Put what a worker held before everything else, and return how much that was."""
        keys = self.held.pop(worker, [])
        self.waiting.extendleft(reversed(keys))
        return len(keys)

    @property
    def finished(self) -> bool:
        """Whether every question is answered."""
        return not self.waiting and not any(self.held.values())


@dataclass(frozen=True)
class Worker:
    """How one worker is started: what it is told first, its environment and its log."""

    begin: Mapping[str, Any]
    environment: Mapping[str, str]
    log: Path


class Crew:
    """Workers as processes that end with this one; the queue lives here and so survives any of them."""

    def __init__(self, workers: Sequence[Worker], keys: Sequence[Key], questions: Mapping[str, Question]) -> None:
        self._workers = workers
        self._queue = Queue(deque(keys))
        self._questions = questions
        self._processes = Processes()
        self._wires: dict[int, Wire] = {}
        self._idle: dict[int, int] = {}
        """Workers that wait for questions, and how many they have room for."""
        self._failure: UserError | None = None
        self.notes: list[str] = []
        """What the engines said of their choices."""
        self.ready_s: float | None = None
        """When the first worker had its model loaded (time.monotonic)."""

    def run(self, *, stopped: Callable[[], bool], answered: Callable[[Key], None]) -> None:
        """Have all questions answered; return early where `stopped` says so. `answered` hears of each.

        The workers are killed at the end, whatever it is: each line is on disk before it is told, and they hold
        nothing else.

        Raises:
            UserError: a worker failed, or all were killed; what was answered is on disk.
        """
        with ExitStack() as stack:
            stack.callback(self._processes.kill)
            selector = stack.enter_context(selectors.DefaultSelector())
            for number, worker in enumerate(self._workers):
                selector.register(self._start(number, worker), selectors.EVENT_READ, number)
            while not self._queue.finished and not stopped():
                # Whoever is gone by now has said all it had to say, even where a child of its own keeps the line open.
                gone = {number for number in self._wires if self._processes.exit_codes()[number] is not None}
                speaking = {ready.data for ready, _ in selector.select(POLL_S)}
                for number in speaking:
                    self._listen(selector, number, answered)
                for number in gone - speaking:
                    self._lose(selector, number)
                self._feed()

    def _start(self, number: int, worker: Worker) -> Wire:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            arguments = [str(descriptor)]
            self._processes.start(WORKER_MODULE, arguments, worker.environment, worker.log, inherited=[descriptor])
        wire = self._wires[number] = Wire(ours)
        wire.send(worker.begin)
        return wire

    def _listen(self, selector: selectors.BaseSelector, number: int, answered: Callable[[Key], None]) -> None:
        """Take in what a worker says, or that it is gone."""
        messages = self._wires[number].receive()
        if messages is None:
            self._lose(selector, number)
            return
        for message in messages:
            match message:
                case {"notes": notes}:
                    self.ready_s = self.ready_s or time.monotonic()
                    for note in notes:
                        self._note(note)
                case {"want": room, "idle": idle}:
                    self._idle[number] = room
                    if not idle:
                        self._give(number)
                case {"done": [strategy, question]}:
                    self._queue.done(number, (strategy, question))
                    answered((strategy, question))
                case {"failed": failure}:
                    self._failure = self._failure or _failure(failure, self._workers[number].log)

    def _note(self, note: str) -> None:
        """Keep what an engine says of its choices, and show it unless only its figures are new."""
        if note.partition(":")[0] not in {kept.partition(":")[0] for kept in self.notes}:
            tell(f"  {note}")
        if note not in self.notes:
            self.notes.append(note)

    def _feed(self) -> None:
        """Give questions to whoever waits for some."""
        for number in list(self._idle):
            if self._queue.waiting:
                self._give(number)

    def _give(self, number: int) -> None:
        keys = self._queue.take(number, self._idle.pop(number), len(self._wires))
        items = [[strategy, question_message(self._questions[question])] for strategy, question in keys]
        self._wires[number].send({"items": items})

    def _lose(self, selector: selectors.BaseSelector, number: int) -> None:
        """Take back what a worker that is gone held; one that failed by itself ends the run."""
        selector.unregister(self._wires[number])
        self._wires.pop(number).close()
        self._idle.pop(number, None)
        child = self._processes.children[number]
        code = child.wait()
        back = self._queue.give_back(number)
        if self._failure is not None:
            raise self._failure
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        log = self._workers[number].log
        tell(f"worker {number} was ended by {name}; {back} open questions go back to the queue (log: {log})")
        if not self._wires and not self._queue.finished:
            raise UserError(
                f"every worker was ended from outside, the last one by {name}",
                hints=["run the same command to go on: what was answered is kept", f"the last log is {log}"],
                exit_code=ExitCode.FAILED,
            )


def _failure(said: Mapping[str, Any], log: Path) -> UserError:
    return UserError(
        said["message"],
        problems=said["problems"],
        hints=[*said["hints"], f"the worker's log is {log}; what was answered is kept"],
        exit_code=ExitCode(said["exit_code"]),
    )

"""Messages between the command and a worker: one JSON object a line, over a pair of sockets that only they hold."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from trainwright.evaluate.questions.question import Question
from trainwright.runs.writing import plain

CHUNK_BYTES = 1 << 16


class Wire:
    """One end of the connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._end.fileno()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message; False if the other end is gone."""
        try:
            self._end.sendall(json.dumps(plain(message), separators=(",", ":")).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for the other end and return its whole messages so far, None if it is gone."""
        try:
            data = self._end.recv(CHUNK_BYTES)
        except ConnectionResetError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of the other end until it is gone."""
        while (received := self.receive()) is not None:
            yield from received

    def close(self) -> None:
        """Let the other end know that nothing more comes."""
        self._end.close()


def question_message(question: Question) -> dict[str, Any]:
    """Return a question as plain data."""
    return asdict(question)


def question_of(message: Mapping[str, Any]) -> Question:
    """Return the question that `question_message` made plain."""
    answer = message["answer"]
    return Question(
        **{
            **message,
            "choices": tuple(message["choices"]),
            "answer": answer if isinstance(answer, int) else tuple(answer),
            "gold_passages": tuple(message["gold_passages"]),
        }
    )

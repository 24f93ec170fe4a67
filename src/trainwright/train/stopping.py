"""A request to stop: noted in the signal handler, agreed on by all ranks at the next step boundary."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)


class StopRequest:
    """Remembers that this rank was asked to stop; the handler does nothing else, so it is safe at any moment."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def listen(self) -> None:
        """Note SIGTERM, SIGINT, SIGUSR2 and SIGHUP from now on (USR1 is left to NCCL's own use)."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        # The launcher starts a rank with these blocked, so that none is lost before this point.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal_name is not None

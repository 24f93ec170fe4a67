"""What every view asks for: the newest View, of a run or of this machine."""

from __future__ import annotations

from typing import Protocol

from trainwright.watch.view import View


class Reader(Protocol):
    """RunReader and MachineReader."""

    def read(self) -> View:
        """Return what is known now."""

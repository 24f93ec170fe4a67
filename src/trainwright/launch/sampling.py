"""The sampler of this node, for as long as an attempt runs, and the alerts that it tells."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainwright.launch.processes import Processes
from trainwright.launch.run_output import tell
from trainwright.runs.folder import RunFolder

LAST_SAMPLE_S = 5.0
"""How long the sampler may take for its last sample, before it is killed."""


class Alerts:
    """Passes on what the sampler tells."""

    def __init__(self, log: Path) -> None:
        self._log, self._offset = log, 0

    def follow(self) -> None:
        """Show the whole lines that have come since the last call."""
        with suppress(OSError), self._log.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
            whole = text.rfind(b"\n") + 1
            self._offset += whole
            for line in text[:whole].decode("utf-8", "replace").splitlines():
                tell(line)


@contextmanager
def sampling(folder: RunFolder, attempt: int, *, node: int = 0) -> Iterator[Alerts]:
    """Sample this node while an attempt runs on it; a sampler that cannot start or dies harms nothing else."""
    log = folder.attempt_dir(attempt) / ("sampler.log" if node == 0 else f"sampler-{node}.log")
    sampler, alerts = Processes(), Alerts(log)
    with suppress(OSError):
        sampler.start("trainwright.watch.sampler", [str(folder.path), str(attempt), str(node)], {}, log)
    try:
        yield alerts
    finally:
        sampler.ask_to_stop()
        for child in sampler.children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(LAST_SAMPLE_S)
        sampler.kill()
        alerts.follow()

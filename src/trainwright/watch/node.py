"""This machine as one sample after the other."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from trainwright.watch.gpus import GpuReader
from trainwright.watch.host_sampler import HostReader
from trainwright.watch.ranks import RankProcesses
from trainwright.watch.samples import RankSample, Sample


class NodeReader:
    """Reads this machine, sample after sample, with the ranks of an attempt that run on it."""

    def __init__(self, run_dir: Path, attempt: int | None, gpus: GpuReader) -> None:
        self._attempt, self._gpus = attempt, gpus
        self._host = HostReader(run_dir)
        self._processes = RankProcesses()
        self._node = socket.gethostname()

    def read(self, ranks: Sequence[RankSample] = ()) -> Sample:
        """Return a sample; `ranks` are those of all nodes."""
        return Sample(
            time_s=time.time(),
            node=self._node,
            attempt=self._attempt,
            gpus=self._gpus.read(),
            host=self._host.read(),
            ranks=tuple(self._processes.add_to(rank) for rank in ranks if rank.node == self._node),
            notes=() if self._gpus.note is None else (self._gpus.note,),
        )

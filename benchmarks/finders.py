"""The batch-size finders of accelerate and Lightning, each in a worker of Trainwright on the step of its own probes."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainwright.runs.writing import write_json_atomic
from trainwright.train import worker
from trainwright.train.probing import RankProbe

Try = Callable[[int], None]
"""Does a step that takes as much memory as a micro-batch of this size ever does; raises where that is too much."""
Finder = Callable[[Try, int, Path], int]
"""Returns the micro-batch it ends with; the second argument is the largest wanted, the third a folder to write in."""
SAMPLES = 4096
"""Of Lightning's data set: it goes up until the memory ends, whatever batch is wanted."""


def by_accelerate(attempt: Try, largest: int, _: Path) -> int:
    """Begin with the largest and go down to nine tenths each time, as `find_executable_batch_size` does."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=largest)  # type: ignore[untyped-decorator]
    def steps(batch_size: int) -> int:
        for _ in range(2):
            attempt(batch_size)
        return batch_size

    return int(steps())


def by_lightning_doubling(attempt: Try, _: int, folder: Path) -> int:
    """Double from 2 on until the memory does not suffice: the finder's default."""
    return _by_lightning("power", attempt, folder)


def by_lightning_halving(attempt: Try, _: int, folder: Path) -> int:
    """Double from 2 on, then halve the interval; its own margin of 5 % is taken off."""
    return _by_lightning("binsearch", attempt, folder)


def _by_lightning(mode: str, attempt: Try, folder: Path) -> int:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.strategies import SingleDeviceStrategy
    from pytorch_lightning.tuner.tuning import Tuner

    class Steps(LightningModule):
        """A module whose step is an attempt."""

        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.unused = torch.nn.Parameter(torch.zeros(()))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """Return one for nothing: Lightning counts its steps, the attempt has its own."""
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def train_dataloader(self) -> torch.utils.data.DataLoader[int]:
            """Return numbers: of a batch only its size counts."""
            return torch.utils.data.DataLoader(range(SAMPLES), batch_size=self.batch_size)  # type: ignore[arg-type]

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            """Take the memory of so many samples."""
            attempt(len(batch))
            return self.unused * 0

    trainer = Trainer(
        default_root_dir=folder,
        strategy=SingleDeviceStrategy(torch.device("cpu")),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found = Tuner(trainer).scale_batch_size(Steps(), mode=mode)
    assert found is not None
    return found


@contextlib.contextmanager
def finding_by(find: Finder) -> Iterator[None]:
    """Let workers forked in here run a finder instead of a probe; found.json in the run folder says what it found."""

    def instead(loop: Any, wanted: Mapping[str, Any]) -> None:
        tried: list[int] = []

        def attempt(size: int) -> None:
            if tried[-1:] != [size]:
                tried.append(size)
            try:
                RankProbe(loop, wanted).longest_step(size)
            except torch.OutOfMemoryError as error:
                # What the frames hold would else be on the device while a finder handles the error, and fail it there.
                traceback.clear_frames(error.__traceback__)
                raise torch.OutOfMemoryError(str(error)) from None

        found = find(attempt, wanted["micro_batch_sizes"][0], loop.folder.path)
        write_json_atomic(loop.folder.path / "found.json", {"found": found, "tries": len(tried)})

    ours, worker.probe = worker.probe, instead
    try:
        yield
    finally:
        worker.probe = ours

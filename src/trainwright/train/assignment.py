"""What this rank was told to do: the layout of the plan and its own place in it."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Assignment:
    """One rank's share of the layout in plan.json; batch sizes in samples."""

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    device: str
    strategy: str
    precision: str
    micro_batch_size: int
    gradient_accumulation_steps: int
    eval_batch_size: int
    gradient_checkpointing: bool
    offload: str

    @classmethod
    def from_environment(cls, layout: dict[str, Any]) -> Assignment:
        """Return the assignment of this process: the layout from the plan, the rank from the launcher's variables."""
        own = {field.name for field in dataclasses.fields(cls)} & layout.keys()
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            attempt=int(os.environ["TRAINWRIGHT_ATTEMPT"]),
            **{name: layout[name] for name in own},
        )

    def micro_batches(self, samples: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """Return this rank's part of each micro-step of a global batch.

        Every rank gets the same number of micro-steps, as collectives need; where the batch does not divide, parts
        differ by one sample at most and may be empty. A whole batch gives `micro_batch_size` samples each time.
        """
        micro_steps = -(-len(samples) // (self.micro_batch_size * self.world_size))
        return [np.array_split(part, self.world_size)[self.rank] for part in np.array_split(samples, micro_steps)]

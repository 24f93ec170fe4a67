"""What this rank was told to do: the layout of the plan and its own place in it."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from trainwright.errors import UserError
from trainwright.job.schedule import apportion
from trainwright.job.schema import Job
from trainwright.train.cutting.split import Split


def require_same_global_batch(job: Job, layout: dict[str, Any]) -> None:
    """Raise UserError where the layout in plan.json was made for another global batch than the job in resolved.json."""
    asked, planned = job.train.global_batch_size, layout["global_batch_size"]
    if asked != planned:
        raise UserError(
            f"resolved.json says train.global_batch_size={asked}, and plan.json is for {planned}",
            hints=["do not edit either: change the job, and run `trainwright train` again, which writes both"],
        )


@dataclass(frozen=True)
class Assignment:
    """One rank's share of the layout in plan.json; batch sizes in samples. The global batch is the job's.

    `rank_samples` are those of a global batch on each rank, and `rank_micro_batch_sizes` what each takes at once; both
    empty where all ranks are alike.
    """

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
    rank_samples: tuple[int, ...] = ()
    rank_micro_batch_sizes: tuple[int, ...] = ()
    sync_each_micro_batch: bool = False

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

    def split(self, global_batch_size: int) -> Split:
        """How the plan shares a global batch among the ranks."""
        alike = (1,) * self.world_size
        weights = self.rank_samples or apportion(global_batch_size, alike)
        at_once = self.rank_micro_batch_sizes or [self.micro_batch_size] * self.world_size
        return Split(tuple(weights), tuple(at_once))

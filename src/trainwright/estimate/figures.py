"""What an Estimate consists of: the memory of a rank and of a host, and the time of a step, each by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PARTS = (
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "inputs",
    "activations",
    "recomputed",
    "logits and loss",
    "weight casts",
    "gathered weights",
    "communication",
    "kernel temporaries",
    "workspaces",
    "temporaries",
    "rounding",
)
"""Of allocated memory; the closed form and the traced step use the same words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Peak memory of one rank on its GPU in bytes, three figures that are kept apart.

    `allocated_bytes` is torch.cuda.max_memory_allocated, `reserved_bytes` max_memory_reserved (it decides whether the
    step fits), `device_bytes` what nvidia-smi shows: reserved and what lies outside torch's allocator. `parts_bytes`
    sum to allocated, `outside_bytes` (CUDA context and libraries, communicator buffers) to device - reserved. `peak`
    says where in the step the peak is. `evaluation_bytes` is the allocated peak of an evaluation pass, and
    `evaluation_reserved_bytes` what is reserved when it has followed; None where only a replay or a trace would know.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    parts_bytes: Mapping[str, int]
    outside_bytes: Mapping[str, int]
    peak: str
    evaluation_bytes: int | None = None
    evaluation_reserved_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Resident memory of one rank, and of all that runs on one node, in bytes by part.

    `peak` is when a node holds the most: loading, training, saving, or exporting the final model.
    """

    rank_parts_bytes: Mapping[str, int]
    node_bytes: int
    peak: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Time of one optimizer step (all its micro-batches) in seconds, by part, with the range it is expected in.

    `parts_s` sum to `step_s`; communication counts only what is not hidden behind compute. `limit` names the part that
    sets the pace. `ranks_s` is the time each rank computes before it has to wait for the slowest, by rank.
    """

    step_s: float
    low_s: float
    high_s: float
    parts_s: Mapping[str, float]
    limit: str
    ranks_s: tuple[float, ...]

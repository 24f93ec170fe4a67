"""What is asked of a user's own training script: the first steps it makes on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainwright.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """One rank's process, run as `python SCRIPT ARGUMENTS` would run it."""

    script: tuple[str, ...]
    """Path and arguments; a leading `python` is left out."""
    working_directory: str = "."
    compute_capability: tuple[int, int] = (8, 0)
    gpu_name: str = "NVIDIA GPU"
    capacity_bytes: int
    """Memory of the GPU, as the script is told; what it takes beyond is reported, not refused."""
    expandable_segments: bool = False
    world_size: int = 1
    """Ranks; the script is rank 0 of them, started as torchrun would start it."""
    ranks_per_node: int | None = None
    """GPUs the script sees; None: all ranks are on one node."""
    steps: int = 2
    """Optimizer steps; the first lacks the optimizer's states."""
    limit_s: float = 300.0

    evaluation_batch_size = None
    """An evaluation is the script's own business."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise UserError("this script cannot be traced", problems=problems)

    @staticmethod
    def parse(data: Mapping[str, Any]) -> ScriptRequest:
        """Read a request from JSON data.

        Raises:
            UserError: unknown keys, missing keys, or values out of range; all of them at once.
        """
        known = [field.name for field in fields(ScriptRequest)]
        problems = [f"{key}: is not known; there are {', '.join(sorted(known))}" for key in data if key not in known]
        problems += [f"{key}: is missing" for key in ("script", "capacity_bytes") if key not in data]
        script = data.get("script", ["?"])
        if not isinstance(script, list) or not script or not all(isinstance(word, str) for word in script):
            problems.append("script: must be a list of strings, the path first")
        if problems:
            raise UserError("this script cannot be traced", problems=problems)
        words = script[1:] if Path(script[0]).name.startswith("python") else script
        values = dict(data) | {"script": tuple(words)}
        if "compute_capability" in values:
            values["compute_capability"] = tuple(values["compute_capability"])
        return ScriptRequest(**values)

    @property
    def path(self) -> Path:
        """The script's file."""
        return Path(self.working_directory, self.script[0])

    @property
    def local_ranks(self) -> int:
        """GPUs of this node."""
        return self.ranks_per_node or self.world_size

    def _problems(self) -> list[str]:
        problems = []
        if not self.script or not self.path.is_file():
            named = f"`{self.path}`" if self.script else "nothing but `python`"
            problems.append(f"script: {named} is no file; give the path of a Python script and its arguments")
        for name in ("capacity_bytes", "world_size", "steps", "limit_s", "local_ranks"):
            if getattr(self, name) <= 0:
                problems.append(f"{name}: must be above 0, is {getattr(self, name)}")
        return problems

"""One attempt of a user's own script as its script.json says, and the launcher that starts its ranks.

A launcher is told fixed text, whole numbers and the path of script.json; the command itself goes from that file to
`execve`, one element an argument, and never through a shell.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from trainwright.runs.folder import RunFolder
from trainwright.runs.writing import read_json, write_json_atomic

RANK_MODULE = "trainwright.launch.own_script.rank"
BY_HAND = 0
"""The attempt of a script.json that a person starts: it is in no run folder, and what the script prints is shown."""


@dataclass(frozen=True, kw_only=True)
class ScriptStart:
    """One attempt of a script, as script.json holds it."""

    attempt: int
    run_dir: str
    command: tuple[str, ...]
    launcher: str
    working_directory: str
    nodes: int
    ranks_per_node: int
    device: str
    accelerate_config: str
    environment: dict[str, str]

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.nodes * self.ranks_per_node

    @property
    def folder(self) -> RunFolder:
        """The run."""
        return RunFolder(self.run_dir)

    def write(self) -> Path:
        """Write script.json into the folder of the attempt, and return its path."""
        path = self.folder.script_json(self.attempt)
        write_json_atomic(path, asdict(self))
        return path

    @staticmethod
    def read(path: Path) -> ScriptStart:
        """Return what `write` wrote."""
        content = read_json(path)
        return ScriptStart(**content | {"command": tuple(content["command"])})


def launcher_command(start: ScriptStart, script_json: Path) -> list[str]:
    """Return what starts the ranks on one machine, each of which runs the script."""
    launcher = [sys.executable, "-m", "trainwright.train.launcher", start.launcher]
    rank = ["-m", RANK_MODULE, str(script_json)]
    match start.launcher:
        case "torchrun":
            return [*launcher, f"--nproc-per-node={start.ranks}", *rank]
        case "accelerate":
            return [*launcher, "--quiet", "--config_file", start.accelerate_config, *rank]
        case "deepspeed":
            options = [f"--num_gpus={start.ranks}", "--no_local_rank", "--module"]
            return [*launcher, *options, RANK_MODULE, str(script_json)]
        case _:
            return [sys.executable, *rank]

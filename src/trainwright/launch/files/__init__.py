"""The files that others' launchers read: accelerate's YAML, DeepSpeed's JSON, and a script for torchrun."""

from trainwright.launch.files.nodes import Nodes
from trainwright.launch.files.plan_folder import write_files

__all__ = ["Nodes", "write_files"]

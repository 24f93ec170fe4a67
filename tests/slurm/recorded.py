"""What Slurm 22.05 and 24.11 printed about the same cluster (tests/data/slurm), read as a Cluster."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Final

from trainwright.hardware.slurm.cluster import Cluster
from trainwright.hardware.slurm.cluster_parser import Texts, read_cluster

DATA: Final = Path(__file__).parents[1] / "data" / "slurm"
VERSIONS: Final = ("22.05.8", "24.11.5")


def recorded_texts(version: str) -> Texts:
    """Return what each program printed."""
    folder = DATA / version
    return Texts(
        config=(folder / "config.txt").read_text(),
        nodes=(folder / "nodes.txt").read_text(),
        partitions=(folder / "partitions.txt").read_text(),
        queue=(folder / "queue.txt").read_text(),
        reservations=(folder / "reservations.txt").read_text(),
        quotas=None,
    )


def recorded_cluster(version: str) -> Cluster:
    """Return the cluster of that version."""
    return read_cluster(recorded_texts(version), "root")


def recorded_waits(version: str) -> tuple[datetime, dict[tuple[str, int], tuple[str, int]]]:
    """Return when `sbatch --test-only` was asked, and its stderr and exit status by `--gres` and number of nodes."""
    recorded = json.loads((DATA / version / "test_only.json").read_text())
    answers = {
        (answer["gres"], answer["nodes"]): (answer["stderr"], answer["exit_status"]) for answer in recorded["answers"]
    }
    return datetime.fromisoformat(recorded["asked_at"]), answers

"""Tests on a real Slurm: skipped where it is not installed, a failure there where REQUIRE_SLURM=1 (as in CI)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "standins" / "nvml"))

from nvml_standin import NvmlStandin
from slurm_bed import INSTALL, Node, SlurmBed, missing_programs

from trainwright.hardware.slurm.cluster import Cluster
from trainwright.hardware.slurm.cluster_parser import Texts, read_cluster

NODES = (
    Node("a100-1", {"a100": 4}),
    Node("a100-2", {"a100": 4}),
    Node("v100-1", {"v100": 4}),
    Node("mix-1", {"a100": 2, "v100": 2}),
)


@pytest.fixture(scope="session")
def slurm_programs() -> None:
    """What every bed needs; a test that starts one of its own asks for this."""
    if missing := missing_programs():
        why = f"no Slurm here ({', '.join(missing)} missing): {INSTALL}"
        if os.environ.get("REQUIRE_SLURM") == "1":
            pytest.fail(why)
        pytest.skip(why)


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for NVIDIA's management library, for `SlurmBed(nvml=...)`."""
    return NvmlStandin.build(tmp_path_factory.mktemp("nvml")).folder


@pytest.fixture(scope="session")
def _session_bed(slurm_programs: None, nvml_folder: Path) -> Iterator[SlurmBed]:
    with SlurmBed(NODES, nvml=nvml_folder, kill_wait_s=2) as bed:
        yield bed


@pytest.fixture
def slurm(_session_bed: SlurmBed) -> Iterator[SlurmBed]:
    """Two nodes of four A100, one of four V100, one of two each; empty before each test."""
    yield _session_bed
    _session_bed.clear()


@pytest.fixture
def hardware_cluster() -> Cluster:
    """Nodes that a type alone does not tell apart: two kinds of A100, cards without a type, an unknown one."""
    node = "NodeName={} CPUTot=32 RealMemory=256000 Gres={} ActiveFeatures={} State={} Partitions={}"
    nodes = [
        node.format("b-1", "gpu:a100:2(S:0-1)", "gpu40,ib", "IDLE", "gpu,closed"),
        node.format("b-2", "gpu:a100:2(S:0-1)", "gpu80,ib", "MIXED", "gpu"),
        node.format("b-3", "gpu:h100:8", "ib", "IDLE+DRAIN", "gpu") + " Reason=bad fan [root@2026-01-01T00:00:00]",
        node.format("b-4", "gpu:2(S:0)", "a40", "IDLE", "gpu"),
        node.format("b-5", "gpu:weird:2", "ib", "IDLE", "odd"),
    ]
    queue = "PartitionName={} State={} MaxTime=1-00:00:00 MaxNodes=UNLIMITED Default=NO"
    return read_cluster(
        Texts(
            config="ClusterName = c\nSLURM_VERSION = 24.11.5\n",
            nodes="\n".join(nodes),
            partitions="\n".join(
                [queue.format("gpu", "UP"), queue.format("closed", "DOWN"), queue.format("odd", "UP")]
            ),
            queue="",
            reservations="No reservations in the system\n",
            quotas=None,
        ),
        "user",
    )

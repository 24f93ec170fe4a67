"""What is read of a Slurm cluster: alike from 22.05 and 24.11, and safe to print whatever stands in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import VERSIONS, recorded_cluster
from slurm_bed import SlurmBed

from trainwright.errors import ExitCode
from trainwright.hardware.slurm.cluster import Cluster, gpus_by_type
from trainwright.hardware.slurm.cluster_parser import Texts, minutes, read_cluster
from trainwright.hardware.slurm.cluster_text import cluster_lines
from trainwright.hardware.slurm.gpu_types import model_of


@pytest.mark.parametrize("version", VERSIONS)
def test_nodes_gpus_and_limits_are_read_from_both_versions(version: str) -> None:
    cluster = recorded_cluster(version)
    assert cluster.version == version
    nodes = {node.name: node for node in cluster.nodes}
    assert {name: [(gpus.type, gpus.count, gpus.used) for gpus in node.gpus] for name, node in nodes.items()} == {
        "a100-2": [("a100", 2, 0)],
        "a100-4": [("a100", 4, 4)],
        "mix-1": [("a100", 2, 0), ("v100", 2, 0)],
        "old-1": [("v100", 2, 0)],
        "v100-4": [("v100", 4, 0)],
    }
    assert (nodes["a100-4"].cores, nodes["a100-4"].memory_mib) == (32, 256000)
    assert nodes["a100-4"].memory_used_mib == 1000
    assert nodes["mix-1"].features == ("a100_80gb", "v100_32gb")
    assert gpus_by_type(cluster.nodes_of("gpu")) == {"a100": (8, 4), "v100": (6, 6)}
    gpu, short = cluster.partitions
    assert (gpu.name, gpu.is_default, gpu.is_up, gpu.max_time_min, gpu.default_time_min) == (
        "gpu",
        True,
        True,
        2880,
        10,
    )
    assert (short.name, short.is_up, short.max_time_min, short.max_nodes) == ("short", False, 240, 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_jobs_and_maintenance_are_read_from_both_versions(version: str) -> None:
    cluster = recorded_cluster(version)
    held, running = sorted(cluster.jobs, key=lambda job: job.state)
    assert (held.state, held.gpus, held.user, held.start) == ("PENDING", 4, "root", None)
    assert (running.state, running.gpus) == ("RUNNING", 4)
    assert cluster.waiting("gpu") == (held,)
    (reservation,) = cluster.reservations
    assert reservation.is_maintenance
    assert reservation.name == "upgrade"
    assert any("maintenance" in line and "a100-[2,4]" in line for line in cluster_lines(cluster, {}))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_reason_can_neither_speak_to_the_terminal_nor_for_the_node(version: str) -> None:
    """An administrator's text with escape sequences and with fields of its own, as Slurm kept and printed it."""
    cluster = recorded_cluster(version)
    node = next(node for node in cluster.nodes if node.name == "old-1")
    assert not node.in_service
    assert node.memory_mib == 64000
    assert [gpus.type for gpus in node.gpus] == ["v100"]
    assert node.reason == "fan ?[31mbroken?[0m RealMemory=1 Gres=gpu:h100:8"
    assert all(line.isprintable() for line in cluster_lines(cluster, {}))


def test_every_text_is_made_printable() -> None:
    evil = "\x1b]0;x\x07\u202e"
    node = f"NodeName=n{evil} CPUTot=8 ActiveFeatures=a100{evil} Gres=gpu:a{evil}:4 RealMemory=8000 State=IDLE{evil}"
    texts = Texts(
        config=f"ClusterName = c{evil}\nSLURM_VERSION = 1{evil}\n",
        nodes=f"{node} Partitions=p{evil} Reason=r{evil}\n",
        partitions=f"PartitionName=p{evil} State=UP MaxTime=1:00:00\n",
        queue=f"1{evil}|root|PENDING|p{evil}|gres:gpu:4|1|{evil}|{evil}\n",
        reservations=f"ReservationName=r{evil} StartTime={evil} EndTime={evil} Nodes={evil} Flags=MAINT\n",
        quotas=f"acc{evil}|gres/gpu=4{evil}||\n",
    )
    cluster = read_cluster(texts, "root")
    lines = cluster_lines(cluster, {})
    assert all(line.isprintable() for line in lines)
    assert any("gres/gpu=4" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30", 30), ("15:00", 15), ("0:20", 1), ("04:00:00", 240), ("1-00:00:00", 1440), ("2-12", 3600), ("1-1:30", 1530)],
)
def test_time_limits_are_read_in_all_their_forms(text: str, expected: int) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize("text", ["UNLIMITED", "NONE", "INFINITE", "", "Partition_Limit"])
def test_no_time_limit_is_none(text: str) -> None:
    assert minutes(text) is None


@pytest.mark.parametrize(
    ("kind", "features", "key", "is_assumed"),
    [
        ("a100", (), "a100-40gb", True),
        ("a100", ("nvlink", "a100_80gb"), "a100-80gb", False),
        ("a100", ("gpu80", "pcie"), "a100-80gb", True),
        ("A100-PCIE-40GB", (), "a100-40gb-pcie", False),
        ("nvidia_a100-sxm4-80gb", (), "a100-80gb", False),
        ("tesla_v100-sxm2-32gb", (), "v100-32gb", False),
        ("v100", ("GPU_MEM:32GB", "GPU_SKU:V100_SXM2"), "v100-32gb", False),
        ("v100", ("mem192g", "edr"), "v100-16gb", True),
        ("rtx3090", (), "rtx-3090", False),
        ("h100", (), "h100", False),
        ("rtx6000", (), None, False),
        ("1g.10gb", (), None, False),
        (None, ("rack3", "a40"), "a40", False),
        (None, (), None, False),
    ],
)
def test_types_are_mapped_to_the_catalogue(
    kind: str | None, features: tuple[str, ...], key: str | None, is_assumed: bool
) -> None:
    """A type that may be several models is the one with the least memory, and said to be assumed."""
    model = model_of(kind, features, {})
    assert (model.key, model.is_assumed) == (key, is_assumed)


def test_what_the_user_says_of_a_type_counts() -> None:
    assert model_of("a100", (), {"a100": "a100-80gb"}).key == "a100-80gb"


def test_unknown_types_are_named_and_assumed_ones_told(hardware_cluster: Cluster) -> None:
    text = "\n".join(cluster_lines(hardware_cluster, {}))
    assert "weird: not in the catalogue; say what it is: --gpu-type weird=MODEL" in text
    assert "note: b-3 is out of service (IDLE+DRAIN): bad fan" in text


def test_gpus_shows_the_cluster_as_a_user_sees_it(slurm: SlurmBed) -> None:
    done = slurm.trainwright("gpus", "--slurm", "--gpu-type", "a100=a100-80gb")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "10 a100 (10 free), 6 v100 (6 free)" in done.stdout
    assert "NVIDIA A100 SXM 80 GB" in done.stdout
    assert "v100 may be v100-16gb, v100-32gb" in done.stdout
    first, second = (slurm.trainwright("gpus", "--slurm", "--json") for _ in range(2))
    assert first.stdout == second.stdout
    document = json.loads(first.stdout)
    assert document["schema_version"] == 1
    assert [node["name"] for node in document["nodes"]] == sorted(node["name"] for node in document["nodes"])


def test_a_drained_node_is_shown_with_its_reason_and_no_escape_sequence(slurm: SlurmBed) -> None:
    slurm.run("scontrol", "update", "nodename=v100-1", "state=drain", "reason=\x1b[2Jgone")
    done = slurm.trainwright("gpus", "--slurm")
    slurm.run("scontrol", "update", "nodename=v100-1", "state=resume")
    assert "v100-1 is out of service (IDLE+DRAIN): ?[2Jgone" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("command", [("gpus",), ("plan", "preset:paper_r64")])
def test_without_slurm_the_exit_code_is_4_with_what_to_do(command: tuple[str, ...], tmp_path: Path) -> None:
    done = trainwright(*command, "--slurm", path=tmp_path)
    assert done.returncode == ExitCode.MISSING
    assert "there is no Slurm here" in done.stderr
    assert "login node" in done.stderr


def test_a_controller_that_does_not_answer_is_told_with_its_words(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    program.write_text(
        "#!/bin/sh\necho 'slurm_load_conf error: \x1b[31mUnable to contact slurm controller' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    done = trainwright("gpus", "--slurm", path=tmp_path)
    assert done.returncode == ExitCode.MISSING
    assert "Unable to contact slurm controller" in done.stderr
    assert "\x1b" not in done.stderr


def trainwright(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run the command where only `path` has programs."""
    environment = os.environ | {"PATH": str(path)}
    command = [sys.executable, "-m", "trainwright", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)

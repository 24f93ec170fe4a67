"""What the batch process decides before and after the ranks, without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.errors import UserError
from trainwright.hardware.inventory import parse_inventory
from trainwright.job.loading import load_job
from trainwright.launch.planning import given_keys
from trainwright.launch.slurm.allocation import read_allocation
from trainwright.launch.slurm.batch import is_gone, strategy_lines
from trainwright.launch.train_run import plan_on


@pytest.mark.parametrize(
    ("gpus", "lines"),
    [
        ("a100-80gb:4", ["✅ Using ZeRO-2 (faster, sufficient for A100-40GB+)", "Plan: 4 ranks, zero2, bf16"]),
        ("v100-32gb:4", ["⚠️  V100 detected - Using ZeRO-3 for memory optimization", "Plan: 4 ranks, zero3, fp16"]),
        (
            "a100-80gb:2,v100-32gb:2",
            ["⚠️  V100 detected - Using ZeRO-3 for memory optimization", "Plan: 4 ranks, zero3, fp16"],
        ),
    ],
)
def test_the_flexible_job_of_the_guide_takes_stage_and_precision_by_what_it_got(gpus: str, lines: list[str]) -> None:
    """S0-27, S0-31, S0-32, S0-36, T-02, X-04: planned on the spot, in place of an edited script."""
    loaded = load_job("preset:framer-lora-flexible")
    inventory = parse_inventory(gpus)
    _, plan = plan_on(loaded.job, given_keys(loaded), inventory, inventory.devices, may_leave_idle=False)
    assert strategy_lines(loaded.job, plan) == lines


def test_only_an_earlier_life_of_the_same_job_is_known_to_be_gone_without_asking() -> None:
    """C15: a holder outside of Slurm keeps its lock."""
    assert is_gone("7", {"pid": 1, "slurm_job_id": "7"})
    assert not is_gone("7", {"pid": 1, "slurm_job_id": None})
    assert not is_gone("7", {})


def test_a_node_that_cannot_ask_slurm_still_knows_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some clusters keep scontrol from their nodes: one node is enough to go on, several are not."""
    variables = {"SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n-1", "SLURM_GPUS_ON_NODE": "2", "PATH": str(tmp_path)}
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    allocation = read_allocation("7")
    assert (allocation.nodes, allocation.gpus, allocation.job.restarts) == (("n-1",), 2, 0)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    with pytest.raises(UserError):
        read_allocation("7")

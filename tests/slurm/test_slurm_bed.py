"""The test-bed does what a cluster does, where the other tests rely on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from slurm_bed import Node, SlurmBed

SCRIPT = "#!/bin/bash\n#SBATCH -o %x-%j.out --mem=100\n"


def test_a_job_sees_the_gpus_that_it_was_given(slurm: SlurmBed) -> None:
    """The untyped request on the mixed node, with the environment of a job and NVML as on that node."""
    names = (
        "import pynvml as n; n.nvmlInit();"
        "print([n.nvmlDeviceGetName(n.nvmlDeviceGetHandleByIndex(i)) for i in range(n.nvmlDeviceGetCount())])"
    )
    script = f'{SCRIPT}echo $CUDA_VISIBLE_DEVICES/$SLURM_GPUS_ON_NODE\n"$PYTHON" -c "{names}"\n'
    slurm.env["PYTHON"] = sys.executable
    job = slurm.sbatch(script, "--gres=gpu:3", "-w", "mix-1", name="seen")
    assert slurm.wait_job(job)["JobState"] == "COMPLETED"
    visible, shown = (slurm.root / f"seen.sbatch-{job}.out").read_text().splitlines()
    assert visible == "0,1,2/3"
    assert shown.count("A100") == shown.count("V100") == 2


def test_a_job_runs_on_two_nodes(slurm: SlurmBed) -> None:
    script = SCRIPT + "srun bash -c 'echo $SLURM_NODEID $SLURMD_NODENAME'\n"
    job = slurm.sbatch(script, "-N2", "--ntasks-per-node=1", "--gres=gpu:a100:4", name="two")
    assert slurm.wait_job(job)["JobState"] == "COMPLETED"
    assert sorted((slurm.root / f"two.sbatch-{job}.out").read_text().splitlines()) == ["0 a100-1", "1 a100-2"]


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("ip"), reason="namespaces need root and iproute2")
def test_nodes_have_names_and_addresses_of_their_own(slurm_programs: None) -> None:
    """Two jobs with the same port on two nodes do not meet, and a node's name resolves, as on a cluster."""
    with SlurmBed([Node("n1", {"a100": 1}), Node("n2", {"a100": 1})], namespaces=True) as bed:
        script = SCRIPT + "srun bash -c 'echo $(hostname) $(getent hosts n1 | cut -d\" \" -f1)'\n"
        job = bed.sbatch(script, "-N2", "--ntasks-per-node=1", name="names")
        bed.wait_job(job)
        lines = sorted((bed.root / f"names.sbatch-{job}.out").read_text().splitlines())
        assert [line.split()[0] for line in lines] == ["n1", "n2"]
        assert lines[0].split()[1] == lines[1].split()[1] != "127.0.0.1"


def test_nothing_is_left_behind(slurm_programs: None) -> None:
    """A job that ignores TERM and has left its session ends with the cluster; so does its directory."""
    with SlurmBed([Node("n1", {"a100": 1})]) as bed:
        script = SCRIPT + "setsid bash -c 'trap \"\" TERM; touch started; sleep 600' &\nwait\n"
        bed.sbatch(script, name="stays")
        bed.wait((bed.root / "started").exists, "the job's child")
        root = bed.root
    assert not bed.processes()
    assert not root.exists()
    assert str(root) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout

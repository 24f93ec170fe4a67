"""Runs on a real Slurm, as their users and their clusters disturb them: each ends as if nothing had been."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_bed import Node, SlurmBed
from submitted_runs import (
    HELD_AT,
    SubmittedRun,
    each_sample_once,
    ledger,
    train_here,
    weights_sha256,
    write_job,
)

# Each takes a minute or so on an idle machine, and many on a busy one, where every wait has its own deadline.
pytestmark = pytest.mark.timeout(3600)

PARTITIONS = """\
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=300 MaxTime=04:00:00 State=UP
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=04:00:00 State=UP"""


@pytest.fixture(scope="module")
def bed(slurm_programs: None, nvml_folder: Path) -> Iterator[SlurmBed]:
    """Two partitions, of which one preempts the other; long graces, as the machine may be busy."""
    nodes = [
        Node("a-1", {"a100": 4}),
        Node("a-2", {"a100": 4}),
        Node("mix-1", {"a100": 2, "v100": 2}, features=["mixed"]),
    ]
    preempting = "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE"
    with SlurmBed(nodes, PARTITIONS, preempting, nvml=nvml_folder, kill_wait_s=45) as bed:
        bed.env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        yield bed


@pytest.fixture
def folder(bed: SlurmBed, tmp_path: Path) -> Iterator[Path]:
    """A folder for jobs and runs; no job is left after the test."""
    yield tmp_path
    bed.clear()


@pytest.mark.long
def test_a_run_on_two_nodes_is_that_on_one_through_a_signal_and_a_lost_node(bed: SlurmBed, folder: Path) -> None:
    """T-07, S0-24, S0-35, S1-15, S09: the weights equal those of four ranks on one machine to 1e-6.

    A second run on the same two nodes at the same time does not meet the first. The processes of the lost node live
    on, hold the lock of the run and are given the word to go on in the end: they change nothing.
    """
    import torch
    from safetensors.torch import load_file

    four = {"ranks": 4, "strategy": "ddp"}
    here = train_here(write_job(folder, "here", resources=four))
    run = SubmittedRun.submit(bed, write_job(folder, "two-nodes", resources=four), "--nodes", "2", "--gres", "a100:2")
    (other_folder := folder / "other").mkdir()
    other_job = write_job(other_folder, "beside", resources={"ranks": 2, "strategy": "ddp"})
    other = SubmittedRun.submit(bed, other_job, "--nodes", "2", "--gres", "a100:1")
    run.wait_until_held(1)
    other.wait_until_held(1)
    other.open(1)
    bed.run("scancel", "--signal=USR2", run.job_id)
    run.start_again(1)
    other.finish()
    run.wait_until_held(2)
    assert run.checkpoints() == [HELD_AT]
    lost = bed.job(run.job_id)["BatchHost"]
    bed.stop(f"slurmd.{lost}", signal.SIGKILL)
    bed.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=lost")
    run.start_again(2)
    run.wait_until_held(3)
    assert lost not in bed.job(run.job_id)["NodeList"].replace("[", "").replace("]", "").split(",")
    run.open(3)
    run.finish()
    done = load_file(run.run_dir / "final_model" / "model.safetensors")
    for name, weights in load_file(here / "final_model" / "model.safetensors").items():
        assert torch.allclose(done[name], weights, rtol=0, atol=1e-6), name
    assert each_sample_once(run.run_dir)
    before = weights_sha256(run.run_dir), run.checkpoints()
    run.open(2)
    bed.wait(lambda: not _alive(bed, run.run_dir), "the end of the lost node's processes", deadline_s=300)
    assert (weights_sha256(run.run_dir), run.checkpoints()) == before
    assert bed.job(run.job_id)["JobState"] == "COMPLETED"
    bed.start_slurmd(lost)


@pytest.mark.long
def test_a_run_goes_on_through_all_that_a_cluster_does_to_it(bed: SlurmBed, folder: Path) -> None:
    """S05, S07: requeue, preemption, time limit, cancel and resume; the end is bit for bit that of a run left alone."""
    alone = train_here(write_job(folder, "alone"))
    run = SubmittedRun.submit(bed, write_job(folder, "disturbed"), "--gres", "gpu:a100:1", "--time", "60")
    run.wait_until_held(1)
    status = json.loads(bed.trainwright("status", "disturbed", "--output-dir", "runs", "--json", cwd=folder).stdout)
    assert (status["state"], status["step"], status["outcome"]) == ("RUNNING", HELD_AT - 1, None)
    bed.run("scontrol", "requeue", run.job_id)
    run.start_again(1)

    run.wait_until_held(2)
    urgent = bed.sbatch("#!/bin/bash\n", "-p", "high", "-N3", "--exclusive", "--mem=100", "--gres=gpu:4", name="urgent")
    run.start_again(2)
    assert bed.wait_job(urgent)["JobState"] == "COMPLETED"

    run.wait_until_held(3)
    # Slurm looks at limits every half minute, and tells of one that is at most 180 s and a look away.
    bed.run("scontrol", "update", f"JobId={run.job_id}", "EndTime=now+200")
    run.start_again(3)

    run.wait_until_held(4)
    assert bed.trainwright("cancel", str(run.run_dir)).stdout.split() == [run.job_id]
    assert bed.wait_job(run.job_id)["JobState"] == "CANCELLED"
    run.wait_for("the last checkpoint", lambda: run.checkpoints()[-1] == 4 * HELD_AT)
    status = json.loads(bed.trainwright("status", str(run.run_dir), "--json").stdout)
    assert (status["outcome"], status["checkpoint"], status["restarts"]) == ("stopped", 4 * HELD_AT, 3)

    resumed = bed.trainwright("resume", str(run.run_dir))
    assert resumed.returncode == 0, resumed.stderr
    run.job_id = resumed.stdout.strip()
    run.open(5)
    followed = bed.trainwright("logs", "-f", str(run.run_dir), timeout_s=400).stdout
    run.finish()
    assert "Resuming from checkpoint-16" in followed
    assert "Job completed:" in followed
    assert [row["loss"] for row in ledger(run.run_dir)] == [row["loss"] for row in ledger(alone)]
    assert weights_sha256(run.run_dir) == weights_sha256(alone)
    assert each_sample_once(run.run_dir)
    submitted = run.run_dir / "launcher" / "submitted.json"
    submitted.write_text(submitted.read_text().replace(f'"{run.job_id}"', '"999999"'))
    status = json.loads(bed.trainwright("status", str(run.run_dir), "--json").stdout)
    assert (status["state"], status["outcome"], status["step"]) == (None, "finished", 36), "Slurm has forgotten the job"
    again = bed.trainwright("resume", str(run.run_dir))
    assert again.returncode == 2
    assert "finished" in again.stderr


def test_a_job_for_any_gpus_plans_for_those_that_it_got_and_its_chain_goes_on(bed: SlurmBed, folder: Path) -> None:
    """S0-25 to S0-29, S0-32, S0-36, T-02: two A100 and two V100 are named, and nothing of the submission is edited."""
    job = write_job(folder, "any", resources={"device": "cpu", "precision": "auto"})
    run = SubmittedRun.submit(bed, job, "--gres", "gpu:4", "--constraint", "mixed", "--chain", "2")
    first, second = json.loads((run.run_dir / "launcher" / "submitted.json").read_text())["job_ids"]
    script = (run.run_dir / "launcher" / "job.sbatch").read_text()
    run.wait_until_held(1)
    bed.run("scancel", "--signal=USR2", first)
    assert bed.wait_job(first, deadline_s=400)["ExitCode"] == "75:0"
    run.job_id = second
    run.open(2)
    run.finish()
    assert run.checkpoints()[0] == HELD_AT
    assert each_sample_once(run.run_dir)
    said = (run.run_dir / "logs" / f"train_any_{first}.out").read_text()
    block = said[said.index("GPU Info") :].splitlines()
    assert block[2:5] == [
        "index, name, memory.total, memory.free",
        "0, NVIDIA A100-SXM4-80GB, 81920 MiB, 81620 MiB",
        "1, NVIDIA A100-SXM4-80GB, 81920 MiB, 81620 MiB",
    ]
    assert "⚠️  WARNING: Mixed GPU types detected!" in said
    assert "│ 3     │ Tesla V100-SXM2-32GB  │ 32768 MiB" in said
    assert "  Recommended: Request homogeneous GPUs\n  Example: #SBATCH --gres=gpu:a100:2\n" in said
    assert "resources.device=cpu leaves the GPUs idle" in said
    assert "Plan: 4 ranks, ddp, fp16" in said
    assert (run.run_dir / "launcher" / "job.sbatch").read_text() == script


def _alive(bed: SlurmBed, run_dir: Path) -> list[str]:
    """Return the bed's processes that still work on a run."""
    found = []
    for pid in bed.processes():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except FileNotFoundError:
            continue
        if any(word.startswith(str(run_dir)) for word in words):
            found.append(" ".join(words))
    return found


def test_without_a_request_the_soonest_is_taken_and_a_sites_template_is_the_script(bed: SlurmBed, folder: Path) -> None:
    """What `plan --slurm` puts first is asked for; a template without the place for the launch is refused."""
    job = write_job(folder, "plain", task="causal-lm", task_options={}, resources={"device": "auto"})
    ranked = json.loads(bed.trainwright("plan", str(job), "--slurm", "--json").stdout)["requests"]
    site = folder / "site.sbatch"
    site.write_text("#!/bin/bash\n{{ directives }}\nmodule load cuda\nset -euo pipefail\n{{ launch }}\n")
    shown = bed.trainwright("submit", str(job), "--template", str(site), "--dry-run")
    assert shown.returncode == 0, shown.stderr
    for option in ranked[0]["request"]["options"]:
        assert f"#SBATCH {option}\n" in shown.stdout
    lines = shown.stdout.splitlines()
    assert (lines[0], lines[-3], lines[-2]) == ("#!/bin/bash", "module load cuda", "set -euo pipefail")
    assert lines[-1].startswith("exec ")
    assert bed.run("sbatch", "--test-only", str(folder / "runs" / "plain" / "launcher" / "job.sbatch")).returncode == 0

    site.write_text("#!/bin/bash\n{{ directives }}\n")
    refused = bed.trainwright("submit", str(job), "name=other", "--template", str(site), "--dry-run")
    assert refused.returncode == 2
    assert "{{ launch }}" in refused.stderr
    assert not (folder / "runs" / "other").exists()


TOLD = """
import json, os, sys
from pathlib import Path

world_size, (out, *told) = int(os.environ["WORLD_SIZE"]), sys.argv[1:]
Path(out, f"told_{os.environ['RANK']}.json").write_text(json.dumps([world_size, *map(int, told)]))
"""


def test_a_script_on_any_gpus_is_planned_for_those_that_the_job_got(bed: SlurmBed, folder: Path) -> None:
    """S0-32, T-02: what its placeholders stand for is known inside the job alone, and keeps the global batch."""
    (folder / "told.py").write_text(TOLD)
    told = ["{output_dir}", "{micro_batch_size}", "{gradient_accumulation_steps}"]
    job = {
        "name": "told",
        "script": ["python", "told.py", *told],
        "launcher": "torchrun",
        "model": {"name": "Qwen/Qwen2.5-0.5B"},
        "train": {"global_batch_size": 32},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    done = bed.trainwright("submit", "job.yaml", "--gres", "gpu:4", "--constraint", "mixed", cwd=folder)
    assert done.returncode == 0, done.stderr
    run = SubmittedRun(bed, folder / "job.yaml", done.stdout.split()[0], folder / "outputs" / "told")
    run.finish()
    assert "⚠️  WARNING: Mixed GPU types detected!" in run.said
    assert "(one process a GPU on 2 x NVIDIA A100-SXM4-80GB; " in run.said, "equal shares would wait for the V100"
    ranks = json.loads((run.run_dir / "plan.json").read_text())["layout"]["ranks"]
    assert f"Plan: {ranks} ranks, " in run.said
    for rank in range(ranks):
        world_size, micro_batch, accumulation = json.loads((run.run_dir / "output" / f"told_{rank}.json").read_text())
        assert world_size == ranks
        assert micro_batch * accumulation * ranks == 32

"""What `status` and `logs -f` tell while the controller of a real Slurm is away, and after it has come back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_bed import Node, SlurmBed
from submitted_runs import SubmittedRun

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))

from script_runs import LOOP, LOOP_COMMAND, ScriptRun


@pytest.fixture
def bed(slurm_programs: None) -> Iterator[SlurmBed]:
    """A cluster of its own, as its controller is stopped."""
    with SlurmBed([Node("a-1", {"a100": 1})], kill_wait_s=2) as bed:
        bed.env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        yield bed


def test_harm_11_status_and_logs_need_no_controller_for_what_is_on_disk(bed: SlurmBed, tmp_path: Path) -> None:
    """`logs -f` shows what is there, outlives the controller's absence, and ends with the job."""
    (tmp_path / "loop.py").write_text(LOOP)
    script = ScriptRun(tmp_path)
    script.write_job([*LOOP_COMMAND, "--wait-at", "6"], launcher="python")
    run = SubmittedRun.submit(bed, _named(tmp_path), "--gres", "a100:1", "--time", "60")
    run.wait_for("step 6", lambda: any(record["step"] == 6 for record in script.records()))
    bed.stop("slurmctld")

    began_s = time.monotonic()
    status = bed.trainwright("status", str(script.folder))
    assert time.monotonic() - began_s < 30
    assert status.returncode == 0, status.stderr
    assert "Step 6, " in status.stdout
    assert f"Job {run.job_id}: not known (Slurm does not answer" in status.stdout
    document = json.loads(bed.trainwright("status", str(script.folder), "--json").stdout)
    assert (document["step"], document["state"], document["outcome"]) == (6, None, None)

    command = [sys.executable, "-m", "trainwright", "logs", "-f", str(script.folder)]
    with subprocess.Popen(command, env=bed.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None and following.stderr is not None
        shown = [following.stdout.readline() for _ in range(4)]
        assert "Job Info\n" in shown
        assert "Slurm does not answer" in following.stderr.readline()
        bed.start_controller()
        (tmp_path / "go").touch()
        rest, said = following.communicate(timeout=300)
    assert following.returncode == 0, said
    assert "Slurm answers again" in said and "Job completed:" in rest
    run.finish()


def _named(place: Path) -> Path:
    """Return the job file with the folder of its runs in it, as `SubmittedRun` reads it."""
    job = json.loads((place / "job.yaml").read_text())
    (place / "job.yaml").write_text(json.dumps(job | {"output_dir": str(place / "outputs")}))
    return place / "job.yaml"

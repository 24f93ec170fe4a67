"""A user's own script in Slurm's queue: on two nodes to its end, and through a stop from its own checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
import uuid
from pathlib import Path

import pytest
from slurm_bed import SlurmBed
from submitted_runs import SubmittedRun

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))

from other_user import Attack, listening, processes_marked
from script_runs import JOINED, LOOP, LOOP_COMMAND, ScriptRun

from trainwright.runs.records import read

pytestmark = pytest.mark.timeout(1800)

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_script"
TWO_NODES = ("resources.device=cpu", "resources.ranks=2", "--nodes", "2", "--gres", "a100:1")


@pytest.fixture
def bed(slurm: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> SlurmBed:
    """The cluster of the session, with jobs that take one core a rank."""
    monkeypatch.setattr(slurm, "env", slurm.env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    return slurm


def submit(bed: SlurmBed, script: ScriptRun) -> SubmittedRun:
    """Run `trainwright submit job.yaml` for two nodes, in the folder of the job."""
    done = bed.trainwright("submit", "job.yaml", *TWO_NODES, cwd=script.place)
    assert done.returncode == 0, done.stderr
    return SubmittedRun(bed, script.place / "job.yaml", done.stdout.split()[0], script.folder)


@pytest.mark.long
def test_the_example_trains_on_two_nodes_of_a_cluster_unchanged(bed: SlurmBed, tmp_path: Path) -> None:
    """Done-when 6 under `submit`, S1-23, S1-35: one group of two processes, and metrics of each step."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    script = ScriptRun(tmp_path, "own-script")
    run = submit(bed, script)
    run.finish()
    assert "check ok: processes: 2 started and joined" in run.said
    assert "Job completed:" in run.said
    records = script.records()
    assert [record["step"] for record in records] == list(range(1, 61))
    assert {record["source"] for record in records} == {"trainwright.report"}
    assert (script.folder / "output" / "final_model" / "model.safetensors").is_file()
    status = json.loads(bed.trainwright("status", str(script.folder), "--json").stdout)
    assert (status["outcome"], status["step"]) == ("finished", 60)
    again = bed.trainwright("resume", str(script.folder))
    assert again.returncode == 2
    assert "finished" in again.stderr


@pytest.mark.long
def test_a_stopped_script_is_requeued_and_told_to_go_on_from_its_checkpoint(bed: SlurmBed, tmp_path: Path) -> None:
    """S05: the script saves on SIGTERM in the grace time, exit 75; the same job resumes at the next step."""
    (tmp_path / "loop.py").write_text(LOOP)
    script = ScriptRun(tmp_path)
    script.write_job([*LOOP_COMMAND, "--wait-at", "6"], launcher="torchrun")
    run = submit(bed, script)
    second = script.folder / "logs" / "attempt_1" / "rank_1.started.json"
    run.wait_for("step 6", lambda: second.exists() and any(record["step"] == 6 for record in script.records()))
    bed.run("scancel", "--batch", "--signal=USR2", run.job_id)
    run.start_again(1)
    assert (script.folder / "output" / "checkpoint-6").is_dir()
    (tmp_path / "go").touch()
    run.finish()
    assert "Requeued: this job goes on from here" in run.said
    assert "Resuming from checkpoint-6" in run.said
    assert [(record["attempt"], record["step"]) for record in script.records()] == [
        *((1, step) for step in range(1, 7)),
        *((2, step) for step in range(7, 13)),
    ]
    for attempt, outcome in ((1, "stopped"), (2, "checked")):
        events = [event["event"] for event in read(script.folder / "events.jsonl") if event["attempt"] == attempt]
        assert outcome in events
        for rank in range(2):
            assert script.note(attempt, rank, "ended")["exit_code"] == 0


@pytest.mark.long
def test_harm_01_another_user_runs_no_code_through_the_ports_of_a_submitted_job(
    bed: SlurmBed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The store listens on the address of the first node alone, and nothing in it is unpickled."""
    mark = uuid.uuid4().hex
    monkeypatch.setattr(bed, "env", bed.env | {"MARK": mark})
    (tmp_path / "train.py").write_text(JOINED)
    script = ScriptRun(tmp_path)
    script.write_job(["python", "train.py", "{output_dir}"], launcher="torchrun")
    run = submit(bed, script)
    run.wait_for("the group", lambda: len(list((script.folder / "output").glob("joined_*"))) == 2)
    places = listening(one for one in processes_marked(mark) if not one.name().startswith(("srun", "slurm")))
    assert places and not {address for address, _ in places} & {"0.0.0.0", "::"}, places
    attack = Attack(tmp_path / "canary", places)
    assert any("default_pg" in key for key in attack.keys), "nobody did reach the store, or this test says nothing"
    assert not attack.succeeded, run.said
    (tmp_path / "go").touch()
    run.finish()

"""Jobs that their time limit stops before they get anywhere: told in time, counted, and ended with a reason."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_bed import SlurmBed
from submitted_runs import SubmittedRun, write_job

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "watch"))

from receiver import Receiver

from trainwright.errors import UserError
from trainwright.job.schema import Job
from trainwright.launch.slurm.lives import MOST_LIVES, begin_life, require_progress
from trainwright.plan.slurm.stop_lead import EARLY_S, LARGEST_SHARE, SaveTime, stop_lead
from trainwright.runs.folder import RunFolder


@pytest.fixture
def bed(slurm: SlurmBed, monkeypatch: pytest.MonkeyPatch) -> SlurmBed:
    """The cluster of the session, with jobs that take one core a rank."""
    monkeypatch.setattr(slurm, "env", slurm.env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    return slurm


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with Receiver.listening() as receiver:
        yield receiver


def test_harm_11_the_lead_is_a_share_of_the_limit_and_at_least_what_a_save_takes() -> None:
    """Whatever the two are: either both hold, or it is said that they cannot, or the request is refused."""
    for minutes in (1, 2, 3, 5, 8, 12, 30, 60, 24 * 60):
        for save_s in (0.1, 20.0, 100.0, 1000.0, 20_000.0):
            save = SaveTime(step_s=2.0, save_s=save_s, source="measured")
            try:
                lead = stop_lead(minutes, save)
            except UserError as refused:
                assert save.needed_s + EARLY_S >= (1 - LARGEST_SHARE) * 60 * minutes - EARLY_S
                assert "--time" in refused.render()
                continue
            assert lead.seconds >= save.needed_s
            assert lead.seconds <= max(LARGEST_SHARE * 60 * minutes, save.needed_s + 1)
            assert lead.seconds + EARLY_S < 60 * minutes
            assert lead.warning or lead.seconds + EARLY_S <= 30 * minutes


def test_harm_11_submit_asks_for_a_lead_that_fits_says_why_and_refuses_what_cannot(
    bed: SlurmBed, tmp_path: Path
) -> None:
    """`--time 2` used to be told 180 s before its end, which is at once; a save of 7B parameters takes longer."""
    job = write_job(tmp_path, "short")

    def asked(*arguments: str) -> tuple[int, str, str]:
        done = bed.trainwright("submit", str(job), "--dry-run", "--gres", "a100:1", *arguments)
        found = re.search(r"--signal=B:USR2@(\d+)", done.stdout)
        return done.returncode, found[1] if found else "", done.stderr

    code, lead, said = asked("--time", "60")
    assert (code, lead) == (0, "180") and "warning: of the" not in said
    code, lead, said = asked("--time", "2")
    assert (code, lead) == (0, "30")
    assert "Stop signal: 30 s before the time limit (25% of the limit)" in said and "warning: of the 2 min" in said
    large = {"model": {"name": "Qwen/Qwen2.5-7B"}, "task": "causal-lm", "task_options": {}}
    job.write_text(json.dumps(json.loads(job.read_text()) | large))
    code, _, said = asked("--time", "5")
    assert code == 2 and "leaves nothing to train" in said and "estimate" in said
    code, lead, said = asked("--time", "120")
    assert code == 0 and int(lead) > 180 and "estimate" in said


def test_harm_11_three_lives_that_end_before_an_attempt_opens_end_the_job_with_a_reason(
    bed: SlurmBed, tmp_path: Path, hook: Receiver
) -> None:
    """Each is told to stop while it still plans; none is forgotten, and the end is told once."""
    bed.env = bed.env | {"HOOK": hook.address}
    run = SubmittedRun.submit(
        bed, write_job(tmp_path, "nowhere", alerts={"webhook_env": "HOOK"}), "--gres", "a100:1", "--time", "60"
    )
    lives = run.run_dir / "launcher" / "lives.jsonl"
    for life in range(1, MOST_LIVES + 1):
        run.wait_for(f"life {life}", lambda life=life: lives.exists() and len(lives.read_text().splitlines()) == life)
        bed.run("scancel", "--batch", "--signal=USR2", run.job_id)
        if life < MOST_LIVES:
            run.start_again(life)
    assert bed.wait_job(run.job_id)["JobState"] == "FAILED"
    assert not list((run.run_dir / "logs").glob("attempt_*"))
    said = bed.trainwright("logs", str(run.run_dir)).stdout
    assert "3 lives of the job in a row brought no new checkpoint" in said
    assert [end["rule"] for end in hook.ends] == ["run_failed"]
    assert "3 lives" in hook.ends[0]["what"]

    resumed = bed.trainwright("resume", str(run.run_dir))
    assert resumed.returncode == 0, resumed.stderr
    run.job_id = resumed.stdout.strip()
    run.open(1)
    run.finish()
    assert [end["rule"] for end in hook.ends] == ["run_failed", "run_finished"]


def test_harm_11_a_life_that_saves_begins_the_count_anew(tmp_path: Path) -> None:
    """Of a script both what is recognised as a checkpoint counts, and, where nothing is, any new output."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.launcher_dir.mkdir()
    job = Job.model_validate({"name": "run", "script": ["true"]})
    for saved in (folder.output_dir / "state.txt", folder.output_dir / "checkpoint-4" / "state.json"):
        folder.lives_jsonl.unlink(missing_ok=True)
        for life in range(2 * MOST_LIVES - 1):
            if life == MOST_LIVES - 1:
                saved.parent.mkdir(parents=True, exist_ok=True)
                saved.write_text("4")
            require_progress(folder, job)
            begin_life(folder, job, "7", life)
        with pytest.raises(UserError, match="3 lives of the job in a row"):
            require_progress(folder, job)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_harm_11_a_limit_that_is_too_short_is_not_requeued_for_ever(bed: SlurmBed, tmp_path: Path) -> None:
    """`--time 2` on a run that saves nothing in that time: real limits, real signals, three lives and an end."""
    script = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\ntime.sleep(9999)\n"
    (tmp_path / "idle.py").write_text(script)
    job = {"name": "idle", "script": ["python", "idle.py"], "output_dir": str(tmp_path / "runs")}
    (tmp_path / "idle.yaml").write_text(json.dumps(job | {"resources": {"device": "cpu"}}))
    run = SubmittedRun.submit(bed, tmp_path / "idle.yaml", "--gres", "a100:1", "--time", "2")
    for life in range(1, MOST_LIVES):
        run.start_again(life)
    assert bed.wait_job(run.job_id, deadline_s=300)["JobState"] == "FAILED"
    assert "3 lives of the job in a row brought no new checkpoint" in run.said

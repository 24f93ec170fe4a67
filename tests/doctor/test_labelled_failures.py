"""The labelled failures: right cause and a working fix, and hardly ever a wrong one said with confidence."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from diagnosis import OWN, Verdict, cases_in, judge, summary

from trainwright.doctor.after import diagnose
from trainwright.doctor.causes import Sieve, causes, signs
from trainwright.doctor.finding import HEALTHY, UNDETERMINED

REPOSITORY = Path(__file__).resolve().parents[2]
NOISE = [
    "node1:2201:2260 [0] NCCL INFO Channel 00/02 :    0   1",
    "UserWarning: The given NumPy array is not writable",
    "[2026-02-02 10:11:12,120] [INFO] [utils.py:781:see_memory_usage] MA 12.4 GB  Max_MA 14.1 GB",
    "\x1b[31mDownloading\x1b[0m shards:  50%|#####     | 1/2",
    "{'input_ids': [1, 2, 3], 'attention_mask': [1, 1, 1]}",
]


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    return [judge(case) for case in cases_in([OWN])]


def test_the_set_holds_sixty_caused_and_sixty_written_failures_and_is_small() -> None:
    """Done-when 1: at least 120 cases, each labelled with causes that the doctor knows."""
    counts = {kind: len(cases_in([OWN / kind])) for kind in ("real", "written")}
    assert counts["real"] >= 60 and counts["written"] >= 60
    assert sum(path.stat().st_size for path in OWN.rglob("*") if path.is_file()) < 2_500_000
    known = {*causes(), HEALTHY, UNDETERMINED}
    for case in cases_in([OWN]):
        about = yaml.safe_load((case / "case.yaml").read_text())
        assert set(about["cause"]) <= known, case.name
        assert about["source"].split()[0] in ("caused:", "written"), case.name


def test_nine_in_ten_causes_and_fixes_are_right_and_at_most_two_in_a_hundred_are_wrong_with_confidence(
    verdicts: list[Verdict],
) -> None:
    """Done-when 1."""
    figures = summary(verdicts)
    wrong = [f"{v.name}: {v.said}" for v in verdicts if not v.fix]
    assert figures["right_cause_and_fix_pct"] >= 90, wrong
    assert figures["wrong_but_confident_pct"] <= 2, wrong


def test_a_rank_killed_by_hand_is_never_called_out_of_memory(verdicts: list[Verdict]) -> None:
    """M08: SIGKILL without a word of the kernel."""
    killed = [verdict for verdict in verdicts if "killed-from-outside" in verdict.wanted]
    assert len(killed) >= 5
    assert not [verdict.name for verdict in killed if "oom" in verdict.said]


def test_the_runner_judges_a_folder_that_it_has_not_seen(tmp_path: Path) -> None:
    """Done-when 1: a family as the label, one label alone, a missing fix told apart from a wrong cause."""
    log = (OWN / "written" / "oom-first-step" / "train.log").read_text()
    for name, about in {
        "family": {"cause": "device-oom", "fix": ["gradient_accumulation_steps"]},
        "wrong": {"cause": ["disk-full"], "fix": []},
        "no-fix": {"cause": ["device-oom"], "fix": ["buy a larger one"]},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "case.yaml").write_text(yaml.safe_dump(about))
        (tmp_path / name / "slurm-1.out").write_text(log)
    command = [sys.executable, REPOSITORY / "benchmarks" / "diagnosis.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert '"right_cause": 2' in done.stdout and '"right_cause_and_fix": 1' in done.stdout
    assert "WRONG no-fix: no such fix" in done.stdout
    assert re.search(r"^disk-full +1 +0 +device-oom/at-once \(1\)$", done.stdout, re.MULTILINE), done.stdout


def test_noise_between_the_lines_changes_no_diagnosis(tmp_path: Path) -> None:
    """D04: the same cause with foreign lines strewn in, for every single log of the written cases."""
    draw = random.Random(5)
    for case in cases_in([OWN / "written"]):
        noisy = tmp_path / case.name
        shutil.copytree(case, noisy)
        for log in noisy.glob("*.log"):
            lines = [part for line in log.read_text().splitlines() for part in (line, *draw.choices(NOISE, k=2))]
            log.write_text("\n".join([*NOISE, *lines]) + "\n")
        assert diagnose([noisy]).finding.cause == diagnose([case]).finding.cause, case.name


def test_torn_and_mangled_logs_are_read_without_a_crash(tmp_path: Path) -> None:
    """D04: cut, shuffled and overwritten bytes."""
    draw = random.Random(6)
    kinds = (".log", ".txt", ".out", ".jsonl", ".json")
    files = [
        path
        for path in sorted(OWN.rglob("*"))
        if path.suffix in kinds and path.name != "run.json" and ".error" not in path.name
    ]
    for number in range(150):
        source = draw.choice(files)
        content = bytearray(source.read_bytes() or b"\n")
        for _ in range(20):
            content[draw.randrange(len(content))] = draw.randrange(256)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / source.name).write_bytes(bytes(content[draw.randrange(len(content)) :]))
        diagnose([folder])


def test_every_sign_is_reached_by_the_text_that_it_needs() -> None:
    """What is not looked at for want of a needed text would not have matched either."""
    for case in cases_in([OWN]):
        for log in [*case.glob("*.log"), *case.glob("*.txt"), *case.glob("*.err"), *case.glob("*.out")]:
            for line in log.read_bytes().splitlines()[:400]:
                text = line.decode("utf-8", "replace")
                reached = set(map(id, Sieve(text).of(text, in_traceback=True)))
                missed = [s.pattern.pattern for s in signs() if id(s) not in reached and s.pattern.search(text)]
                assert not missed, (log, text)

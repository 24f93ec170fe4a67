"""`trainwright tune` on a script of the user's own, told its micro-batch by the placeholder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from trainwright.runs import index

SCRIPT = """
import argparse, sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--out", type=Path)
parser.add_argument("--room", type=int)
args = parser.parse_args()
(args.out / "written").touch()
for step in range(1, 13):
    if step == 3 and args.batch > args.room:
        sys.exit("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    print(f"step {step}/12 | loss: {3 / step:.4f} | {0.1 + args.batch / 100:.2f} s/step", flush=True)
"""


def tune(folder: Path, script: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `trainwright tune` on a job with that script."""
    (folder / "train.py").write_text(SCRIPT)
    job = {"name": "own", "script": script, "resources": {"device": "cpu"}, "train": {"global_batch_size": 24}}
    (folder / "job.yaml").write_text(json.dumps(job))
    return subprocess.run(
        [sys.executable, "-m", "trainwright", "tune", "job.yaml", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_script_is_tried_with_one_micro_batch_after_the_other(tmp_path: Path) -> None:
    """S2-32, S2-34: out of memory is recognised by what the script says last; the output folder stays empty."""
    script = ["python", "train.py", "--batch", "{micro_batch_size}", "--out", "{output_dir}", "--room", "7"]
    listed = index.known()
    done = tune(tmp_path, script, "--json", "--level", "extreme")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [point["micro_batch_size"] for point in found["points"]][-1] == 6, "24 in parts of 7 at most are parts of 6"
    assert found["too_large"] == 8
    assert "CUBLAS_STATUS_ALLOC_FAILED" in found["why"]
    assert all(point["step_s"] > 0 for point in found["points"])
    assert not (tmp_path / "outputs").exists()
    assert index.known() == listed, "a probe is no run"
    dry_run = subprocess.run(
        [sys.executable, "-m", "trainwright", "train", "job.yaml", "--dry-run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--batch 6 " in dry_run.stdout


def test_a_script_that_is_not_told_or_fails_otherwise_is_said_so(tmp_path: Path) -> None:
    untold = tune(tmp_path, ["python", "train.py", "--batch", "4"])
    assert untold.returncode == 2
    assert "{micro_batch_size}" in untold.stderr
    failing = tune(tmp_path, ["python", "train.py", "--bath", "{micro_batch_size}"])
    assert failing.returncode == 1
    assert "unrecognized arguments: --bath" in failing.stderr


def test_a_script_for_which_one_sample_is_too_much_ends_with_what_would_help(tmp_path: Path) -> None:
    script = ["python", "train.py", "--batch", "{micro_batch_size}", "--out", "{output_dir}", "--room", "0"]
    done = tune(tmp_path, script)
    assert done.returncode == 77
    assert "not even a micro-batch of 1 runs" in done.stderr
    assert "hint: " in done.stderr

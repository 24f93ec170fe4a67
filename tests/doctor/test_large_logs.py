"""A log of any size is read in bounded memory, and its last lines are found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.doctor.after import diagnose

SCRIPT = """
import json, resource, sys
from pathlib import Path
from trainwright.doctor.after import diagnose
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = diagnose([Path(sys.argv[1])]).finding
print(json.dumps([found.cause, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""
LAST = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
LINES = {
    "steps": lambda n: f"step {n}/900000  epoch 0.1  loss {1 + 1 / (n + 1):.4f}  lr 1e-05  0.1 s/step\n",
    "bars": lambda n: f"\r {n % 100}%|####      | {n}/900000 [00:12<11:02,  1.93s/it]",
    "words": lambda n: f"worker {n:x} wrote {n * 7919:x} of part {n * 104729:x} at {n * 15485863:x}\n",
}


@pytest.mark.parametrize("kind, megabytes", [("steps", 50), ("bars", 20), ("words", 20)])
def test_a_large_log_takes_little_memory(tmp_path: Path, kind: str, megabytes: int) -> None:
    """D04: step lines, one endless line of a progress bar, and lines that never repeat."""
    log = tmp_path / "train.log"
    with log.open("w") as file:
        number = 0
        while file.tell() < megabytes * 1_000_000:
            file.write("".join(map(LINES[kind], range(number, number + 5000))))
            number += 5000
        file.write("\n" + LAST)
    done = subprocess.run([sys.executable, "-c", SCRIPT, log], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    cause, grown_kib = json.loads(done.stdout)
    assert cause == "slurm/time-limit"
    assert grown_kib < 120 * 1024


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    """D04: nine megabytes without a line break, the message at its end."""
    log = tmp_path / "train.log"
    log.write_bytes(b"x" * 9_000_000 + b" RuntimeError: CUDA error: out of memory")
    assert diagnose([log]).finding.cause.startswith("device-oom")

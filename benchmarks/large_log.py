"""How long `trainwright doctor` takes over a log of a gigabyte, and how much memory.

    python benchmarks/large_log.py [--megabytes 1000] [--kind mixed|prose] [--out FILE.json]

`mixed` are step lines, lines of identifiers, warnings of ranks and records of a Trainer, drawn at random; `prose` are
sentences of which hardly two are alike, as samples that a program prints. The last line is a failure, which must be
found. The doctor runs as a command, in a process of its own; times are those of the clock and of the processor.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taken import taken

LAST = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
CAUSE = "slurm/time-limit"
MOST_S, MOST_MIB = 60, 300
LINES_AT_ONCE = 5000
DOCS = Path(__file__).parents[1] / "docs"


def mixed(draw: random.Random) -> Callable[[int], str]:
    """Return what writes line n of a log of a run."""

    def line(n: int) -> str:
        kind = draw.random()
        if kind < 0.5:
            return f"step {n}/90000000  epoch 0.1  loss {1 + 1 / (n + 1):.4f}  lr 1e-05  0.1 s/step\n"
        if kind < 0.8:
            return f"worker {n:x} wrote {n * 7919:x} of part {n * 104729:x} at {n * 15485863:x}\n"
        if kind < 0.9:
            what = draw.choice("abcdefgh") * draw.randint(1, 9)
            return f"[rank{n % 8}]: UserWarning: something {what} is deprecated\n"
        return f"{{'loss': {2 - n / 1e8:.4f}, 'grad_norm': 1.2, 'epoch': {n / 1e5:.4f}}} {draw.random()}\n"

    return line


def prose(draw: random.Random) -> Callable[[int], str]:
    """Return what writes sentence n, of the words of this project's documentation."""
    words = sorted({word for path in DOCS.glob("*.md") for word in path.read_text(encoding="utf-8").split()})
    return lambda n: f"[{n}] sample: {' '.join(draw.choices(words, k=draw.randint(5, 25)))}\n"


KINDS = {"mixed": mixed, "prose": prose}


def measured(kind: str, megabytes: int) -> dict[str, Any]:
    """Write a log, let the doctor read it, and return what that took."""
    line = KINDS[kind](random.Random(1))
    with tempfile.TemporaryDirectory(prefix="large-log-") as folder:
        log = Path(folder) / "train.log"
        with log.open("w") as file:
            number = 0
            while file.tell() < megabytes * 1_000_000:
                file.write("".join(map(line, range(number, number + LINES_AT_ONCE))))
                number += LINES_AT_ONCE
            file.write(LAST)
        began_s = time.monotonic()
        command = [sys.executable, "-m", "trainwright", "doctor", str(log), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wall_s = time.monotonic() - began_s
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "kind": kind,
        "megabytes": megabytes,
        "lines": number + 1,
        "cause": json.loads(done.stdout)["diagnosis"]["cause"],
        "wall_s": round(wall_s, 1),
        "processor_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_mib": used.ru_maxrss // 1024,
    }


def main() -> int:
    """Measure and print; 1 if the cause was not found, or it took too long or too much memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--kind", choices=KINDS, default="mixed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures = measured(options.kind, options.megabytes)
    for name, value in figures.items():
        print(f"{name:12} {value}")
    if options.out:
        command = f"python benchmarks/large_log.py --megabytes {options.megabytes} --kind {options.kind}"
        options.out.write_text(json.dumps(taken(command, ("trainwright",)) | figures, indent=1) + "\n")
    kept = figures["cause"] == CAUSE and figures["wall_s"] < MOST_S and figures["peak_mib"] < MOST_MIB
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())

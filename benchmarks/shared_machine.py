"""What another busy process costs a rank whose threads spin while they wait, and one whose threads sleep.

    python benchmarks/shared_machine.py --pairs 2 --out benchmarks/results/shared_machine.json

Each case is a run of `trainwright train` by itself: one rank with a thread a core, with GNU OpenMP's own default (spin
for 3 ms) or with what the product sets (sleep), alone on the machine or beside one process that only counts. The order
within a pair is turned round each time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from live_run import LiveRun, ledger
from taken import taken

STEPS, WARM_UP = 24, 4
MODELS = {"0.3 M parameters": (128, 2), "13 M parameters": (512, 4)}
"""Hidden size and layers: work between two waits of some microseconds, and of milliseconds."""
WAITING = {"spinning": {"GOMP_SPINCOUNT": "300000"}, "sleeping": {}}
LINE = "{:18} {:8} {:>14} {:>14} {:>8}"


def main() -> None:
    """Time every case in pairs, and write what each took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    print(LINE.format("model", "machine", "spinning", "sleeping", "ratio"))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for model in MODELS:
            for busy in (0, 1):
                rows.append(_row(Path(name), model, busy, told.pairs))
                row = rows[-1]
                spinning, sleeping = row["spinning_step_s"], row["sleeping_step_s"]
                print(
                    LINE.format(
                        model,
                        "loaded" if busy else "idle",
                        f"{spinning:.4f} s/step",
                        f"{sleeping:.4f} s/step",
                        f"{spinning / sleeping:.2f}",
                    ),
                    flush=True,
                )
    if told.out:
        told.out.write_text(json.dumps(taken(f"shared_machine.py --pairs {told.pairs}") | {"rows": rows}, indent=1))


def _row(place: Path, model: str, busy: int, pairs: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in WAITING}
    with _busy_processes(busy):
        for pair in range(pairs):
            for way in sorted(WAITING, reverse=bool(pair % 2)):
                folder = place / f"{model}-{busy}-{pair}-{way}".replace(" ", "-")
                seconds[way].append(_mean_step_s(folder, model, WAITING[way]))
    return {
        "model": model,
        "busy_processes": busy,
        **{f"{way}_step_s": statistics.median(found) for way, found in seconds.items()},
        **{f"{way}_runs_s": found for way, found in seconds.items()},
    }


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _mean_step_s(folder: Path, model: str, waiting: dict[str, str]) -> float:
    hidden, layers = MODELS[model]
    folder.mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": f"{i} " * 40}) + "\n" for i in range(8 * STEPS)))
    dimensions = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    job = {
        "name": "run",
        "output_dir": ".",
        "model": {
            "from_scratch": {"architecture": "llama", "dimensions": dimensions},
            "tokenizer": {"vocab_size": 300},
        },
        "data": {"path": "data.jsonl", "max_length": 64, "cache_dir": "cache"},
        "train": {"global_batch_size": 8, "max_steps": STEPS, "learning_rate": 1e-4},
        "checkpoint": {"every": "1000 steps"},
        "resources": {"device": "cpu", "precision": "fp32", "ranks": 1},
        "tracking": [],
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    threads = {"OMP_NUM_THREADS": str(os.cpu_count())}
    with LiveRun(folder, folder / "run", [], environment=threads | waiting) as run:
        if run.end(within_s=900):
            raise AssertionError(run.said)
    return statistics.fmean(row["step_s"] for row in ledger(folder / "run")[WARM_UP:])


if __name__ == "__main__":
    main()

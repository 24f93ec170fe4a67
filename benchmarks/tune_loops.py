"""Tune a job on two ranks again and again under DDP, FSDP2 and ZeRO-2, and see that no probe ever stands still.

    python benchmarks/tune_loops.py --runs 20 --out benchmarks/results/tune_loops.json

In each run one rank, or both, has memory for so many samples and no more, and says so as torch, CUDA, cuBLAS, NCCL or
the host's allocator do; in every fifth run a rank of the first probe is killed, in every fifth one stands still. `tune`
has to find just what fits, and to lose the harmed probe and no other. Workers are forked (`forked.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forked import forked_probes
from hungry_task import MESSAGES
from live_run import TINY_GPT2
from taken import taken

from trainwright.job.loading import load_job
from trainwright.tune.search import sizes_of
from trainwright.tune.tuning import TuneOptions, tune

STRATEGIES = ("ddp", "fsdp2", "zero2")
RANKS, SHARE = 2, 16
TIMEOUT_S = 45.0
"""Of a probe, which takes some seconds; one that stands still costs as much."""
LIBRARIES = ("trainwright", "torch", "transformers", "deepspeed")
HARMS = {3: "kill", 4: "hang"}
"""By the run's number, modulo 5."""
LINE = "{:8} {:>3} {:>5} {:>6} {:8} {:6} {:>6} {:>6} {:>6} {:>5} {:>5}"
HEADINGS = ("strategy", "run", "room", "on", "message", "harm", "fits", "found", "probes", "lost", "s")


@dataclass(frozen=True)
class Loop:
    """One run of tune: what the ranks had room for, and what was found in how many probes."""

    strategy: str
    number: int
    room: int
    ranks: tuple[int, ...]
    message: str
    harm: str | None
    fits: int
    found: int
    probes: int
    lost: int
    wall_s: float

    @property
    def problems(self) -> list[str]:
        """What is not as promised."""
        found = []
        if self.found != self.fits:
            found.append(f"{self.fits} fit, {self.found} were found")
        if self.lost != (self.harm is not None):
            found.append(f"{self.lost} probes were lost")
        return [f"{self.strategy}, run {self.number}: {problem}" for problem in found]

    def __str__(self) -> str:
        on = "+".join(map(str, self.ranks))
        return LINE.format(
            self.strategy, self.number, self.room, on, self.message, self.harm or "-", self.fits, self.found,
            self.probes, self.lost, f"{self.wall_s:.0f}",
        )  # fmt: skip


def write_job(folder: Path) -> None:
    """Write job.yaml, its data and its tasks."""
    rows = [{"prompt": f"what is {' and '.join(str(n * k) for k in range(n % 9 + 1))}?", "response": "it"}
            for n in range(96)]  # fmt: skip
    for name, content in (("data", rows), ("eval", rows[:16])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    for task in ("harmed_task.py", "hungry_task.py"):
        shutil.copy(Path(__file__).with_name(task), folder)
    job = {
        "name": "loop",
        "task": "harmed_task:Harmed",
        "model": {"from_scratch": TINY_GPT2, "tokenizer": {"vocab_size": 300}},
        "data": {"path": "data.jsonl", "eval_path": "eval.jsonl", "max_length": 48, "cache_dir": "cache"},
        "train": {"global_batch_size": RANKS * SHARE, "max_steps": 4},
        "resources": {"device": "cpu", "precision": "fp32", "ranks": RANKS, "balance": "off"},
        "tracking": [],
    }
    (folder / "job.yaml").write_text(json.dumps(job, indent=1))


def loop(strategy: str, number: int, draw: random.Random) -> Loop:
    """Tune once, from an empty store."""
    room = draw.choice(sizes_of(SHARE)[:-1])
    ranks = draw.choice([(0,), (1,), (0, 1)])
    message, harm = draw.choice(list(MESSAGES)), HARMS.get(number % 5)
    options: dict[str, Any] = {"room": room, "ranks": list(ranks), "message": message}
    if harm is not None:
        options |= {"harm": harm, "harmed_rank": draw.randrange(RANKS)}
    overrides = [f"task_options={json.dumps(options)}", f"resources.strategy={strategy}"]
    said, began_s = io.StringIO(), time.monotonic()
    with contextlib.redirect_stderr(said):
        answer = tune(
            load_job("job.yaml", overrides), TuneOptions(timeout_s=TIMEOUT_S, fresh=True), open_probes=forked_probes
        )
    return Loop(
        strategy=strategy,
        number=number,
        room=room,
        ranks=ranks,
        message=message,
        harm=harm,
        fits=room,
        found=answer.tuned.levels["extreme"],
        probes=answer.tuned.probes,
        lost=said.getvalue().count("  lost at "),
        wall_s=round(time.monotonic() - began_s, 1),
    )


def main() -> int:
    """Run the loops, print a table, write the results; 1 if anything was not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401

    import trainwright.train.worker  # noqa: F401

    loops = []
    draw = random.Random(options.seed)
    print(LINE.format(*HEADINGS))
    with tempfile.TemporaryDirectory(prefix="tune-loops-") as place:
        os.environ["XDG_DATA_HOME"] = str(Path(place) / "home")
        os.chdir(place)
        write_job(Path(place))
        for strategy in STRATEGIES:
            for number in range(options.runs):
                loops.append(loop(strategy, number, draw))
                print(loops[-1], flush=True)
    problems = [problem for each in loops for problem in each.problems]
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.out:
        command = f"python benchmarks/tune_loops.py --runs {options.runs} --seed {options.seed}"
        record = {**taken(command, LIBRARIES), "problems": problems, "loops": [asdict(each) for each in loops]}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Let ranks run out of memory, here and there in a run, and see whether it ends as if they had not.

    python benchmarks/oom_trials.py --trials 20 --out benchmarks/results/oom_trials.json

Each trial is a run of two ranks in which one of them, or both, raises what torch, CUDA, cuBLAS, NCCL or the host's
allocator raise, whenever a pass is larger than its memory is said to be. The run has to go on by itself with less at
once: no hang, the samples as planned, and the weights of a run that had all the memory (no dropout). The last trials
let a single sample be too much: the run has to end with exit code 77.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hungry_task import MESSAGES
from kill_trials import samples_are_exact
from live_run import TINY_GPT2, LiveRun, ledger
from taken import taken

from trainwright.runs.records import read

SAMPLES, GLOBAL_BATCH, MICRO_BATCH, EPOCHS = 48, 8, 4, 2
SAVE_EVERY_STEPS = 2
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
STRATEGIES = ("ddp", "fsdp2", "zero2")
LIBRARIES = ("trainwright", "torch", "transformers", "deepspeed")
MOST_DIFFERENT = 1e-6
HANG_S = 240
"""A run that says nothing for so long hangs; on an idle machine it never takes five seconds."""
AGREED_WITHIN_S = 10
LINE = "{:38} {:8} {:6} {:>5} {:>8} {:>9} {:>9} {:>11} {:>7}"
JOB = {
    "name": "trial",
    "task": "hungry_task:Hungry",
    "model": {
        "from_scratch": {**TINY_GPT2, "dimensions": {**TINY_GPT2["dimensions"], **NO_DROPOUT}},
        "tokenizer": {"vocab_size": 300},
    },
    "data": {"path": "data.jsonl", "eval_path": "eval.jsonl", "max_length": 64, "cache_dir": "cache"},
    "train": {
        "global_batch_size": GLOBAL_BATCH,
        "micro_batch_size": MICRO_BATCH,
        "num_train_epochs": float(EPOCHS),
        "learning_rate": 2e-4,
    },
    "checkpoint": {"every": f"{SAVE_EVERY_STEPS} steps", "keep": 2},
    "resources": {"device": "cpu", "precision": "fp32", "ranks": 2},
    "tracking": [],
}


@dataclass(frozen=True)
class Scarcity:
    """How little memory there is, and where; the options of the hungry task."""

    what: str
    message: str
    strategy: str
    options: Mapping[str, Any]
    survives: bool = True

    @property
    def overrides(self) -> list[str]:
        """It as overrides of the job."""
        options = {"message": self.message, **self.options}
        found = [f"task_options.{key}={json.dumps(value)}" for key, value in options.items()]
        if not self.survives:
            return [*found, "train.micro_batch_size=1"]
        return [*found, f"resources.strategy={self.strategy}"]


@dataclass(frozen=True)
class Outcome:
    """What became of one run: `largest_difference` is between its final weights and those of one with memory enough."""

    what: str
    message: str
    strategy: str
    exit_code: int | None
    attempts: int
    slowest_to_agree_s: float
    largest_difference: float | None
    largest_metric_difference: float | None
    samples_as_planned: bool | None
    wall_s: float
    survives: bool

    def __str__(self) -> str:
        return LINE.format(
            self.what,
            self.message,
            self.strategy,
            "HANG" if self.exit_code is None else self.exit_code,
            self.attempts,
            f"{self.slowest_to_agree_s:.1f} s",
            "-" if self.largest_difference is None else f"{self.largest_difference:.0e}",
            {None: "-", True: "as planned", False: "WRONG"}[self.samples_as_planned],
            f"{self.wall_s:.0f} s",
        )

    @property
    def problems(self) -> list[str]:
        """What is not as promised."""
        found = []
        if self.exit_code is None:
            found.append("hangs")
        elif self.exit_code != (0 if self.survives else 77):
            found.append(f"ended with {self.exit_code}")
        if self.survives and (self.largest_difference is None or self.largest_difference > MOST_DIFFERENT):
            found.append(f"final weights differ by {self.largest_difference}")
        if self.survives and not self.samples_as_planned:
            found.append("trained on other samples than planned")
        if not self.survives and self.attempts > 3:
            found.append(f"{self.attempts} attempts at what cannot work")
        return [f"{self.what} ({self.message}, {self.strategy}): {problem}" for problem in found]


@dataclass
class Trials:
    """The trials in one folder, and the run with memory enough that each has to equal."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": f"what is {n} and {n * 7 % 13}?", "response": str(n + n * 7 % 13)} for n in range(SAMPLES)]
        held_out = [{"prompt": f"what is {n} and 1?", "response": str(n + 1)} for n in range(100, 126)]
        for name, content in (("data", rows), ("eval", held_out)):
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        (self.folder / "job.yaml").write_text(json.dumps(JOB, indent=1))  # JSON is YAML 1.2
        shutil.copy(Path(__file__).with_name("hungry_task.py"), self.folder)
        plenty = Scarcity("none", "torch", "ddp", {"ranks": []})
        with self.start("reference", plenty) as run:
            assert run.end() == 0, run.said
        self.reference = run.run_dir

    def start(self, name: str, scarcity: Scarcity, *arguments: str) -> LiveRun:
        """Start a run."""
        return LiveRun(self.folder, self.folder / "outputs" / name, [f"name={name}", *scarcity.overrides, *arguments])

    def run(self, name: str, scarcity: Scarcity) -> tuple[Outcome, LiveRun]:
        """Let a run meet with scarcity, and see what becomes of it."""
        began_s = time.monotonic()
        with self.start(name, scarcity) as run:
            code = end_unless_it_hangs(run)
        done = code == 0
        return Outcome(
            what=scarcity.what,
            message=scarcity.message,
            strategy=scarcity.strategy,
            exit_code=code,
            attempts=run.attempt,
            slowest_to_agree_s=round(slowest_to_agree_s(run.run_dir), 2),
            largest_difference=largest_difference(run.run_dir, self.reference) if done else None,
            largest_metric_difference=largest_metric_difference(run.run_dir, self.reference) if done else None,
            samples_as_planned=samples_as_planned(run.run_dir) if done else None,
            wall_s=round(time.monotonic() - began_s, 1),
            survives=scarcity.survives,
        ), run


def end_unless_it_hangs(run: LiveRun) -> int | None:
    """Return the exit status of a run, None if nothing was heard of it for too long."""
    heard, heard_s = "", time.monotonic()
    while (code := run.launcher.poll()) is None and time.monotonic() < heard_s + HANG_S:
        if run.said != heard:
            heard, heard_s = run.said, time.monotonic()
        time.sleep(0.1)
    return code


def scarcities(trials: int, seed: int) -> list[Scarcity]:
    """Return so many kinds of scarcity: on one rank, on all, at a random step, in evaluation, and with no way out."""
    draw = random.Random(seed)
    found = []
    for index in range(trials):
        message, strategy = draw.choice(list(MESSAGES)), STRATEGIES[index % len(STRATEGIES)]
        rank, step = draw.randrange(2), draw.randrange(1, 9)
        kinds = (
            Scarcity(f"rank {rank}, from pass {step}", message, strategy, {"ranks": [rank], "room": 2, "step": step}),
            Scarcity(f"both ranks, from pass {step}", message, strategy, {"ranks": [0, 1], "room": 1, "step": step}),
            Scarcity(f"rank {rank}, at step 3", message, strategy, {"ranks": [rank], "room": 2, "step": 3}),
            Scarcity(f"rank {rank}, evaluation", message, strategy, {"ranks": [rank], "evaluation_room": 4}),
            Scarcity("a single sample", message, "auto", {"ranks": [rank], "room": 0}, survives=False),
        )
        found.append(kinds[index % len(kinds)])
    return found


def slowest_to_agree_s(run_dir: Path) -> float:
    """Return the longest time from the first rank's last word to the start of the next attempt, 0 without one."""
    slowest = 0.0
    attempts = sorted((run_dir / "logs").glob("attempt_*"), key=lambda path: int(path.name.removeprefix("attempt_")))
    for before, after in itertools.pairwise(attempts):
        words = [json.loads(path.read_text())["time_s"] for path in before.glob("rank_*.error.json")]
        slowest = max(slowest, (after / "start.json").stat().st_mtime - min(words))
    return slowest


def largest_difference(run_dir: Path, reference: Path) -> float:
    """Return the largest difference between the final weights of two runs."""
    from safetensors.torch import load_file

    mine, theirs = (load_file(path / "final_model" / "model.safetensors") for path in (run_dir, reference))
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def largest_metric_difference(run_dir: Path, reference: Path) -> float:
    """Return the largest difference between the evaluations of two runs; both have to have made all of them."""
    mine, theirs = (
        {row["step"]: row["loss"] for row in read(path / "metrics.jsonl") if row["kind"] == "eval"}
        for path in (run_dir, reference)
    )
    assert mine.keys() == theirs.keys(), (sorted(mine), sorted(theirs))
    return max(abs(mine[step] - theirs[step]) for step in mine)


def samples_as_planned(run_dir: Path) -> bool:
    """Say whether the steps that count cover each epoch once, and the model was shown just their samples."""
    rows = ledger(run_dir)
    shown: Counter[str] = Counter()
    planned = 0
    for attempt in {row["attempt"] for row in rows}:
        own = [row for row in rows if row["attempt"] == attempt]
        if own[-1]["step"] != rows[-1]["step"]:
            continue  # what it did after its last commit was done again, and only the last attempt's steps all count
        planned = GLOBAL_BATCH * len(own)
        for path in run_dir.glob(f"shown-{attempt}-*.jsonl"):
            shown.update(path.read_text().splitlines())
    return samples_are_exact(rows, EPOCHS) and shown.total() == planned and max(shown.values()) <= EPOCHS


def main() -> int:
    """Run the trials, print a table, write the results; 1 if anything was not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    outcomes = []
    headings = ("too little memory on", "message", "strategy", "exit", "attempts", "agreed in", "weights", "samples")
    print(LINE.format(*headings, "wall"))
    with tempfile.TemporaryDirectory(prefix="oom-trials-") as folder:
        trials = Trials(Path(folder))
        for number, scarcity in enumerate(scarcities(options.trials, options.seed)):
            outcome, _ = trials.run(f"trial-{number}", scarcity)
            outcomes.append(outcome)
            print(outcome, flush=True)
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    slow = [outcome for outcome in outcomes if outcome.slowest_to_agree_s > AGREED_WITHIN_S]
    problems += [f"{outcome.what}: not all ranks had ended within {AGREED_WITHIN_S} s" for outcome in slow]
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps(_record(options, outcomes), indent=1) + "\n")
    return 1 if problems else 0


def _record(options: argparse.Namespace, outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        **taken(
            f"python benchmarks/oom_trials.py --trials {options.trials} --seed {options.seed}",
            LIBRARIES,
        ),
        "hangs": sum(outcome.exit_code is None for outcome in outcomes),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


if __name__ == "__main__":
    sys.exit(main())

"""Kill a run at random moments, again and again, and see whether it ends as if nothing had happened.

    python benchmarks/kill_trials.py --kills 20 --launcher-kills 5 --out benchmarks/results/kill_trials.json

For each strategy: one run that is left alone, one whose ranks are all killed (SIGKILL) at seeded random moments while
the launcher restarts it by itself, and one whose launcher is killed and the same command given again. A kill counts as
mid-save when the staging folder of a checkpoint is there at that moment.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from live_run import TINY_GPT2, LiveRun, kill_frozen, ledger
from taken import taken

STRATEGIES = {"single": 1, "ddp": 2, "fsdp2": 2}
SAMPLES, GLOBAL_BATCH, SAVE_EVERY_STEPS = 48, 8, 2
STARTUP_SHARE, STARTUP_S, STEPS_AHEAD, MOMENT_S = 0.2, 4.0, 6, 0.1
"""One kill in five falls within the first seconds of an attempt; the others up to so many steps and seconds later."""

LINE = "{:9} {:9} {:>5} {:>8} {:>10} {:>10} {:>10} {:>9} {:>7}"
JOB = {
    "name": "trial",
    "model": {"from_scratch": TINY_GPT2, "tokenizer": {"vocab_size": 300}},
    "data": {"path": "data.jsonl", "max_length": 64, "cache_dir": "cache"},
    "train": {
        "global_batch_size": GLOBAL_BATCH,
        "micro_batch_size": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
    },
    "checkpoint": {"every": f"{SAVE_EVERY_STEPS} steps", "keep": 2},
    "resources": {"device": "cpu", "precision": "fp32", "balance": "off"},
    "tracking": [],
}


@dataclass(frozen=True)
class Outcome:
    """What became of one run: the kills it took, and how its end compares with the run that was left alone."""

    strategy: str
    ranks: int
    killed: str
    kills: int
    mid_save: int
    most_lost_steps: int
    slowest_to_vanish_s: float
    weights_sha256: str
    same_weights: bool
    same_losses: bool
    each_sample_once_an_epoch: bool
    wall_s: float

    def __str__(self) -> str:
        return LINE.format(
            self.strategy,
            self.killed,
            self.kills,
            self.mid_save,
            f"{self.most_lost_steps} steps",
            "identical" if self.same_weights else "DIFFERENT",
            "identical" if self.same_losses else "DIFFERENT",
            "once" if self.each_sample_once_an_epoch else "NOT ONCE",
            f"{self.wall_s:.0f} s",
        )

    @property
    def problems(self) -> list[str]:
        """What is not as promised."""
        found = []
        if not self.same_weights:
            found.append("the final weights differ")
        if not self.same_losses:
            found.append("the losses differ")
        if not self.each_sample_once_an_epoch:
            found.append("a sample was not trained on exactly once an epoch")
        if self.most_lost_steps > SAVE_EVERY_STEPS:
            found.append(f"{self.most_lost_steps} steps lost at once")
        if self.slowest_to_vanish_s > 10:
            found.append(f"a rank was still there after {self.slowest_to_vanish_s:.0f} s")
        return [f"{self.strategy}, {self.killed} killed: {problem}" for problem in found]


@dataclass
class Trials:
    """The trials of one strategy in one folder."""

    folder: Path
    strategy: str
    epochs: int
    seed: int

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = ({"prompt": f"what is {n} and {n * 7 % 13}?", "response": str(n + n * 7 % 13)} for n in range(SAMPLES))
        (self.folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (self.folder / "job.yaml").write_text(json.dumps(JOB, indent=1))  # JSON is YAML 1.2
        with self._run("reference") as run:
            assert run.end() == 0, run.said
        self.reference = run.run_dir

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return STRATEGIES[self.strategy]

    def kill_ranks(self, kills: int, mid_saves: int) -> Outcome:
        """Kill all ranks `kills` times; the launcher brings the run to its end by itself."""
        began_s, moments = time.monotonic(), _Moments(self.seed, self.strategy, kills, mid_saves)
        attempt = 0
        with self._run("ranks-killed", "--max-restarts", str(kills)) as run:
            while moments.left:
                ranks = run.wait_for_ranks(self.ranks, after_attempt=attempt)
                attempt = run.attempt
                moments.count(self._kill_at_a_moment(run, ranks, attempt, moments))
            assert run.end() == 0, run.said
        return self._outcome(run, "ranks", moments, 0.0, began_s)

    def kill_launcher(self, kills: int, mid_saves: int) -> Outcome:
        """Kill the launcher `kills` times and give the same command again each time."""
        began_s, moments = time.monotonic(), _Moments(self.seed + 1, self.strategy, kills, mid_saves)
        slowest_s = 0.0
        while moments.left:
            with self._run("launcher-killed") as run:
                ranks = run.wait_for_ranks(self.ranks)
                moments.count(self._kill_at_a_moment(run, ranks, run.attempt, moments, launcher=True))
                slowest_s = max(slowest_s, run.vanish())
        with self._run("launcher-killed") as run:
            assert run.end() == 0, run.said
        return self._outcome(run, "launcher", moments, slowest_s, began_s)

    def _run(self, name: str, *options: str) -> LiveRun:
        run_dir = self.folder / "outputs" / name
        overrides = [
            f"name={name}",
            f"resources.strategy={self.strategy}",
            f"resources.ranks={self.ranks}",
            f"train.num_train_epochs={self.epochs}",
        ]
        return LiveRun(self.folder, run_dir, [*overrides, *options])

    def _kill_at_a_moment(
        self, run: LiveRun, ranks: list[psutil.Process], attempt: int, moments: _Moments, *, launcher: bool = False
    ) -> bool:
        moments.wait(run, attempt)
        while (mid_save := kill_frozen(run, ranks, only_mid_save=moments.aim, launcher=launcher)) is None:
            run.wait_for("a save", run.staging)
        return mid_save

    def _outcome(self, run: LiveRun, killed: str, moments: _Moments, slowest_s: float, began_s: float) -> Outcome:
        rows, expected = ledger(run.run_dir), ledger(self.reference)
        starts = [run.start_step(attempt) for attempt in range(1, run.attempt + 1)]
        lasts = [run.last_step(attempt) for attempt in range(1, run.attempt + 1)]
        lost = [last - (start or 0) for last, start in zip(lasts, starts[1:], strict=False)]
        weights = weights_sha256(run.run_dir)
        return Outcome(
            strategy=self.strategy,
            ranks=self.ranks,
            killed=killed,
            kills=moments.kills,
            mid_save=moments.mid_save,
            most_lost_steps=max(lost, default=0),
            slowest_to_vanish_s=round(slowest_s, 2),
            weights_sha256=weights,
            same_weights=weights == weights_sha256(self.reference),
            same_losses=[row["loss"] for row in rows] == [row["loss"] for row in expected],
            each_sample_once_an_epoch=samples_are_exact(rows, self.epochs),
            wall_s=round(time.monotonic() - began_s, 1),
        )


class _Moments:
    """When to kill: seeded and random, and aimed at a save once the quota could be missed otherwise."""

    def __init__(self, seed: int, strategy: str, kills: int, mid_saves: int) -> None:
        self._random = random.Random(f"{seed}/{strategy}")
        self.kills, self._quota = kills, mid_saves
        self.done = self.mid_save = 0

    @property
    def left(self) -> int:
        """Kills still to come."""
        return self.kills - self.done

    @property
    def aim(self) -> bool:
        """Whether the next kill has to be in the middle of a save."""
        return self._quota - self.mid_save >= self.left

    def count(self, mid_save: bool) -> None:
        """Note a kill."""
        self.done += 1
        self.mid_save += mid_save

    def wait(self, run: LiveRun, attempt: int) -> None:
        """Wait for the next moment in an attempt whose ranks have just been started."""
        in_startup, share = self._random.random() < STARTUP_SHARE, self._random.random()
        steps = self._random.randrange(STEPS_AHEAD)
        if in_startup and not self.aim:
            time.sleep(STARTUP_S * share)
            return
        run.wait_for("a step", lambda: run.last_step(attempt) > (run.start_step(attempt) or 0) + steps)
        time.sleep(MOMENT_S * share)


def weights_sha256(run_dir: Path) -> str:
    """Return the sha256 of the final weights."""
    return hashlib.sha256((run_dir / "final_model" / "model.safetensors").read_bytes()).hexdigest()


def samples_are_exact(rows: list[dict[str, Any]], epochs: int) -> bool:
    """Say whether the ledger's steps follow each other and their samples cover each epoch once, without a gap.

    The order of an epoch is a permutation of all samples, so a stretch of positions is a set of samples.
    """
    seen = [0, *(row["samples_seen"] for row in rows)]
    sizes = [after - before for before, after in itertools.pairwise(seen)]
    whole_steps = [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return whole_steps and set(sizes) == {GLOBAL_BATCH} and seen[-1] == epochs * SAMPLES


def main() -> int:
    """Run the trials, print a table, write the results; 1 if anything was not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--mid-saves", type=int, default=6, help="of them at least so many during a save")
    parser.add_argument("--launcher-kills", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=35)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    outcomes = []
    print(LINE.format("strategy", "killed", "kills", "mid-save", "most lost", "weights", "losses", "samples", "wall"))
    for strategy in options.strategies:
        with tempfile.TemporaryDirectory(prefix="kill-trials-") as folder:
            trials = Trials(Path(folder), strategy, options.epochs, options.seed)
            mid_saves = round(options.mid_saves / options.kills * options.launcher_kills)
            for outcome in (
                trials.kill_ranks(options.kills, options.mid_saves),
                trials.kill_launcher(options.launcher_kills, mid_saves),
            ):
                outcomes.append(outcome)
                print(outcome, flush=True)
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps(_record(options, outcomes), indent=1) + "\n")
    return 1 if problems else 0


def _record(options: argparse.Namespace, outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        **taken(
            f"python benchmarks/kill_trials.py --kills {options.kills} --mid-saves {options.mid_saves} "
            f"--launcher-kills {options.launcher_kills} --epochs {options.epochs} --seed {options.seed}"
        ),
        "save_every_steps": SAVE_EVERY_STEPS,
        "steps": options.epochs * SAMPLES // GLOBAL_BATCH,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


if __name__ == "__main__":
    sys.exit(main())

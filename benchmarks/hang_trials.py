"""Let runs hang in every way of the fault matrix (H01 to H06) and let healthy ones be slow (H08), and see what is said.

    python benchmarks/hang_trials.py --slow 20 --out benchmarks/results/hang_trials.json

Each trial is a run of two ranks (one for H06) with `resources.hang_timeout_s` of some seconds and no restarts. A hang
has to end with exit code 76, its kind and its rank named; what is slow (a save, an evaluation, the first step), ten
times as long as a step and longer than the time-out of a step, has to end well. A rank that takes twice as long as the
other (H07) has to be told of within 30 steps, and none in the slow runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from live_run import TINY_GPT2, LiveRun
from taken import taken

from trainwright.runs.records import read

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 8.0
"""Of the trials that hang; the tiny model's step takes 0.1 s, on a busy machine some times that."""
SLOW_TIMEOUT_S, PASS_S, SLOW_S = 4.0, 0.5, 5.0
"""Of the trials that are slow: what is slow takes longer than a step may, and five times what a step takes."""
SLOW_STEPS = 40
AT_FAULT = 1
STRAGGLER_WITHIN_STEPS = 30
LINE = "{:5} {:32} {:>8} {:>12} {:>6} {:>6} {:>5}  {}"


@dataclass(frozen=True)
class Trial:
    """One fault; `kind` and `rank` are what has to be said of it, None where the run has to end well."""

    row: str
    what: str
    options: Mapping[str, Any]
    kind: str | None
    rank: int | None = AT_FAULT
    ranks: int = 2
    hurt: Callable[[LiveRun], None] | None = None
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a trial; `detected_s` counts from the fault to the launcher's word."""

    row: str
    what: str
    detected: bool
    detected_s: float | None
    rank_right: bool | None
    class_right: bool | None
    exit_code: int
    stragglers: tuple[str, ...]
    """The ranks that an alert called slow; of H07 rank 1, of all others none."""
    said: str
    problem: str | None

    def __str__(self) -> str:
        marks = [{True: "yes", False: "NO", None: "-"}[mark] for mark in (self.rank_right, self.class_right)]
        seconds = "-" if self.detected_s is None else f"{self.detected_s:.1f} s"
        detected = "yes" if self.detected else "no"
        return LINE.format(self.row, self.what, detected, seconds, *marks, self.exit_code, self.said)


def stop_a_rank(run: LiveRun) -> None:
    """SIGSTOP to rank 1, some steps into the run."""
    run.wait_for_step(3)
    run.ranks()[AT_FAULT].send_signal(signal.SIGSTOP)


HANGS = (
    Trial("H01", "rank 1 sleeps", {"fault": "sleep"}, "hang"),
    Trial("H02", "rank 1 is stopped", {"pass_s": 0.2}, "hang/stopped", hurt=stop_a_rank),
    Trial("H03", "rank 1 holds the GIL", {"fault": "gil"}, "hang/silent"),
    Trial("H04", "rank 1 broadcasts, 0 all-reduces", {"fault": "mismatch"}, "collective-mismatch", None),
    Trial("H05", "rank 1 leaves a loop early", {"fault": "uneven"}, "uneven-data"),
    Trial(
        "H06", "a DataLoader worker is stuck", {"fault": "stuck-worker", "rank": 0}, "data-starvation/stuck", 0, ranks=1
    ),
)
STRAGGLER = Trial("H07", "rank 1 takes twice as long", {"fault": "straggler", "slow_s": 2 * PASS_S}, None)
SLOW = (
    Trial("H08", "the first step is slow", {"fault": "slow-step", "step": 1}, None),
    Trial("H08", "evaluations are slow", {"fault": "slow-eval"}, None, overrides={"eval": {"every": "15 steps"}}),
    Trial("H08", "saves are slow", {"fault": "slow-save"}, None, overrides={"checkpoint": {"every": "15 steps"}}),
)


def run_trial(folder: Path, trial: Trial) -> Outcome:
    """Run one trial to its end."""
    write_job(folder, trial)
    environment = {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    run_dir = folder / "runs" / "run"
    with LiveRun(folder, run_dir, ["--max-restarts", "0"], environment=environment) as run:
        if trial.hurt is not None:
            trial.hurt(run)
        hurt_s = time.time()
        code = run.end(600)
        left = [process for process in run.processes() if process.is_running()]
        said = run.said
    return judged(trial, run_dir, code, hurt_s if trial.hurt else None, said, left)


def judged(
    trial: Trial, run_dir: Path, code: int, hurt_s: float | None, console: str, left: list[psutil.Process]
) -> Outcome:
    """Return what became of a run that is over."""
    attempt = run_dir / "logs" / "attempt_1"
    record = attempt / "hang.json"
    hang = json.loads(record.read_text()) if record.exists() else None
    told = [alert for alert in read(run_dir / "alerts.jsonl") if alert["rule"] == "straggler"]
    stragglers = tuple(sorted({alert["subject"] for alert in told}))
    if hang is None:
        problem = None if trial.kind is None and code == 0 else f"exit {code}, nothing detected: {console[-2000:]}"
        if trial.row == "H07":
            samples = {sample["time_s"]: sample["ranks"] for sample in read(run_dir / "system.jsonl")}
            after = max(rank["steps_total"] for rank in samples[told[0]["time_s"]]) if told else None
            said = f"called slow after {after} steps" if told else "never called slow"
            right = stragglers == (f"rank {AT_FAULT}",)
            if not right or after is None or after > STRAGGLER_WITHIN_STEPS:
                problem = problem or f"{said}: {stragglers}"
            return Outcome(trial.row, trial.what, bool(told), None, right, None, code, stragglers, said, problem)
        if stragglers:
            problem = problem or f"called slow, and is not: {stragglers}"
        return Outcome(trial.row, trial.what, False, None, None, None, code, stragglers, "went on to its end", problem)
    # A fault inside of a rank began with the section that the rank is still in.
    beats = [json.loads(path.read_text()) for path in sorted((run_dir / "ranks").glob("rank_*.json"))]
    began_s = hurt_s or max(beat["section_since_s"] for beat in beats)
    right = None if trial.kind is None else (hang["rank"] == trial.rank, hang["kind"] == trial.kind)
    problem = None
    if right is None:
        problem = f"killed, though it was only slow: {hang['why']}"
    elif not all(right) or code != 76:
        problem = f"exit {code}, {hang['kind']} of rank {hang['rank']}: {json.dumps(hang['shown'], indent=1)}"
    elif left:
        problem = f"still alive: {left}"
    return Outcome(
        trial.row,
        trial.what,
        True,
        round(record.stat().st_mtime - began_s, 1),
        right and right[0],
        right and right[1],
        code,
        stragglers,
        hang["why"],
        problem,
    )


def write_job(folder: Path, trial: Trial) -> None:
    """Write job.yaml and its rows."""
    folder.mkdir()
    rows = [{"question": f"Question {number}?", "answer": f"It is {number}."} for number in range(48)]
    for name in ("rows.jsonl", "held_out.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows[: 48 if name == "rows.jsonl" else 8]))
    slow = trial.kind is None
    job: dict[str, Any] = {
        "name": "run",
        "output_dir": str(folder / "runs"),
        "task": "hanging_task:Hanging",
        "task_options": ({"pass_s": PASS_S, "slow_s": SLOW_S} if slow else {}) | dict(trial.options),
        "model": {"from_scratch": TINY_GPT2, "tokenizer": {"vocab_size": 400}},
        "data": {"path": "rows.jsonl", "eval_path": "held_out.jsonl", "max_length": 64, "cache_dir": "cache"},
        "train": {"global_batch_size": 8, "learning_rate": 1e-3, "max_steps": SLOW_STEPS if slow else 400},
        "eval": {"every": "1000 steps"},
        "checkpoint": {"every": "1000 steps"},
        "resources": {
            "device": "cpu",
            "precision": "fp32",
            "ranks": trial.ranks,
            "hang_timeout_s": SLOW_TIMEOUT_S if slow else TIMEOUT_S,
            "balance": "off",
        },
        "tracking": [],
    }
    for key, value in trial.overrides.items():
        job[key] = {**job[key], **value}
    (folder / "job.yaml").write_text(json.dumps(job))


def main() -> int:
    """Run the trials, print a table, write the results; 1 if anything was not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="rows of the fault matrix, such as H03 H04")
    parser.add_argument("--slow", type=int, default=20, help="how many runs of H08, clean ones to H07")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trials = [*HANGS, STRAGGLER, *(SLOW[index % len(SLOW)] for index in range(options.slow))]
    outcomes = []
    print(LINE.format("row", "fault", "detected", "after", "rank", "class", "exit", "said"))
    with tempfile.TemporaryDirectory(prefix="hang-trials-") as folder:
        for number, trial in enumerate(trials):
            if options.only is None or trial.row in options.only:
                outcomes.append(run_trial(Path(folder) / f"trial-{number}", trial))
                print(outcomes[-1], flush=True)
    problems = [outcome.problem for outcome in outcomes if outcome.problem is not None]
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps(_record(options, outcomes), indent=1) + "\n")
    return 1 if problems else 0


def _record(options: argparse.Namespace, outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        **taken(f"python benchmarks/hang_trials.py --slow {options.slow}"),
        "hang_timeout_s": {"hangs": TIMEOUT_S, "slow": SLOW_TIMEOUT_S},
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


if __name__ == "__main__":
    sys.exit(main())

"""Slow some ranks of a run down and see what equal parts cost, and how much of it a balanced split brings back.

    python benchmarks/balance_pairs.py --pairs 3 --out benchmarks/results/balance_pairs.json

Runs come in pairs, one with equal parts and one that measures and shares by speed, in turn first; half of the ranks
get half the processor time of the others, by a quota of their control group (root on Linux), else by stopping them half
of the time. Throughput is that of the steps after the split has changed, and of the same steps with equal parts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from live_run import LiveRun, ledger
from taken import taken

from trainwright.runs.records import read

CASES = {
    "2 ranks, 1 slow": (2, "ddp", 1.25),
    "4 ranks, 2 slow": (4, "ddp", 1.25),
    "2 ranks, 1 slow, fsdp2": (2, "fsdp2", 0.95),
}
"""Ranks, strategy, and the least gain of a balanced split. FSDP2 gathers for every pass on every rank, and here that is
what takes long: nothing is to be gained, and nothing may be lost."""
SAMPLES, GLOBAL_BATCH = 480, 24
STEPS = 96
MOST_DIFFERENT = 1e-6
PERIOD_US = 100_000
LINE = "{:24} {:>5} {:>16} {:>12} {:>12} {:>6} {:>12}"
JOB = {
    "name": "pair",
    "model": {
        "from_scratch": {
            "architecture": "llama",
            "dimensions": {
                "hidden_size": 128,
                "intermediate_size": 384,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 128,
            },
        },
        "tokenizer": {"vocab_size": 300},
    },
    "data": {"path": "data.jsonl", "max_length": 128, "cache_dir": "cache"},
    "train": {
        "global_batch_size": GLOBAL_BATCH,
        "micro_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-4,
    },
    "checkpoint": {"every": "1000 steps"},
    "resources": {"device": "cpu", "precision": "fp32"},
    "tracking": [],
}


@dataclass(frozen=True)
class Pair:
    """Tokens a second of two runs over the same steps, and how much their losses differ."""

    case: str
    samples: tuple[int, ...]
    steps_compared: int
    equal_tokens_s: float
    balanced_tokens_s: float
    largest_loss_difference: float

    @property
    def gain(self) -> float:
        """Balanced over equal throughput."""
        return self.balanced_tokens_s / self.equal_tokens_s

    def __str__(self) -> str:
        shares = " + ".join(map(str, self.samples))
        speeds = f"{self.equal_tokens_s:,.0f}/s", f"{self.balanced_tokens_s:,.0f}/s"
        return LINE.format(
            self.case, self.steps_compared, shares, *speeds, f"{self.gain:.2f}", f"{self.largest_loss_difference:.0e}"
        )


class Quota:
    """Control groups that give each process so much of one core, before other programs get theirs."""

    def __init__(self) -> None:
        v1 = Path("/sys/fs/cgroup/cpu")
        self._v1 = v1.is_dir()
        self._group = (v1 if self._v1 else Path("/sys/fs/cgroup")) / f"pairs-{os.getpid()}"
        self._group.mkdir()
        if self._v1:
            (self._group / "cpu.shares").write_text("262144")
        else:
            (self._group / "cgroup.subtree_control").write_text("+cpu")
            (self._group / "cpu.weight").write_text("10000")

    @staticmethod
    def usable() -> bool:
        """Whether control groups can be made here."""
        try:
            Quota().remove()
        except OSError:
            return False
        return True

    def leave(self, pid: int, share: float) -> None:
        """Leave a process so much of a core from here on."""
        own = self._group / str(pid)
        own.mkdir()
        quota = int(share * PERIOD_US)
        if self._v1:
            (own / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (own / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (own / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        (own / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove the groups, once their processes are gone."""
        for group in [*(path for path in self._group.iterdir() if path.is_dir()), self._group]:
            group.rmdir()


class DutyCycle:
    """Stops processes part of the time, for users who may not make control groups."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def leave(self, pid: int, share: float) -> None:
        """Let a process run only such a part of the time from here on."""
        self._shares[pid] = share

    def remove(self) -> None:
        """Let everything run again."""
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        period_s = PERIOD_US / 1e6
        while not self._over.is_set():
            began_s = time.monotonic()
            for pid, share in sorted(self._shares.items(), key=lambda entry: entry[1]):
                time.sleep(max(0.0, began_s + share * period_s - time.monotonic()))
                self._send(signal.SIGSTOP, [pid] if share < 1 else [])
            time.sleep(max(0.0, began_s + period_s - time.monotonic()))
            self._send(signal.SIGCONT, self._shares)

    @staticmethod
    def _send(number: signal.Signals, pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def run_one(folder: Path, name: str, case: str, *, balance: str) -> LiveRun:
    """Train with the second half of the ranks slowed."""
    count, strategy, _ = CASES[case]
    # Where there are fewer cores than ranks each rank gets its part, less some for the launcher.
    cores = os.cpu_count() or 1
    fair = 1.0 if count <= cores else 0.8 * cores / count
    overrides = [f"name={name}", f"resources.ranks={count}", f"resources.strategy={strategy}"]
    brake: Quota | DutyCycle = Quota() if Quota.usable() else DutyCycle()
    with LiveRun(folder, folder / "outputs" / name, [*overrides, f"resources.balance={balance}"]) as run:
        for rank, process in enumerate(run.wait_for_ranks(count)):
            brake.leave(process.pid, fair if rank < count // 2 else fair / 2)
        assert run.end() == 0, run.said
    brake.remove()
    return run


def tokens_per_s(rows: Sequence[dict[str, Any]]) -> float:
    """Return the throughput over some steps."""
    return sum(row["tokens_per_s"] * row["step_s"] for row in rows) / sum(row["step_s"] for row in rows)


def equal_parts(case: str) -> list[int]:
    """Return the samples of a step on each rank where all have as many."""
    count = CASES[case][0]
    return [GLOBAL_BATCH // count] * count


def pair(folder: Path, case: str, number: int) -> Pair:
    """Run both kinds, one after the other, and compare them."""
    names = {balance: f"{balance}-{number}-{case.replace(' ', '').replace(',', '-')}" for balance in ("off", "auto")}
    order = ("off", "auto") if number % 2 == 0 else ("auto", "off")
    runs = {balance: run_one(folder, names[balance], case, balance=balance) for balance in order}
    equal, balanced = (ledger(runs[balance].run_dir) for balance in ("off", "auto"))
    changes = [event for event in read(runs["auto"].run_dir / "events.jsonl") if event["event"] == "balanced"]
    # The step of the change is the last with equal parts, and the next begins after a checkpoint. Where nothing was to
    # be gained the parts stay equal.
    begins, samples = (changes[-1]["step"] + 1, changes[-1]["after"]) if changes else (STEPS // 2, equal_parts(case))
    compared = slice(begins, None)
    return Pair(
        case=case,
        samples=tuple(samples),
        steps_compared=len(balanced[compared]),
        equal_tokens_s=tokens_per_s(equal[compared]),
        balanced_tokens_s=tokens_per_s(balanced[compared]),
        largest_loss_difference=max(
            abs(one["loss"] - other["loss"]) for one, other in zip(equal, balanced, strict=True)
        ),
    )


def main() -> int:
    """Run the pairs, print a table, write the results; 1 if a balanced run is not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pairs = []
    print(LINE.format("case", "steps", "samples a step", "equal", "balanced", "gain", "loss apart"))
    with tempfile.TemporaryDirectory(prefix="balance-pairs-") as name:
        folder = Path(name)
        rows = (
            {"prompt": f"what is {n} and {n * 7 % 13}? " * 6, "response": f"{n + n * 7 % 13} " * 8}
            for n in range(SAMPLES)
        )
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "job.yaml").write_text(json.dumps(JOB, indent=1))  # JSON is YAML 1.2
        for case in options.cases:
            for number in range(options.pairs):
                pairs.append(pair(folder, case, number))
                print(pairs[-1], flush=True)
    gains = {case: statistics.median(p.gain for p in pairs if p.case == case) for case in options.cases}
    problems = [f"{case}: {gain:.2f} times as fast" for case, gain in gains.items() if gain < CASES[case][2]]
    problems += [f"{p.case}: losses differ" for p in pairs if p.largest_loss_difference > MOST_DIFFERENT]
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps(_record(options, pairs, gains), indent=1) + "\n")
    return 1 if problems else 0


def _record(options: argparse.Namespace, pairs: list[Pair], gains: dict[str, float]) -> dict[str, Any]:
    return {
        **taken(
            f"python benchmarks/balance_pairs.py --pairs {options.pairs} --cases "
            + " ".join(f"'{case}'" for case in options.cases)
        ),
        "slowed_by": "control group quota" if Quota.usable() else "SIGSTOP and SIGCONT",
        "median_gain": gains,
        "pairs": [asdict(p) | {"gain": p.gain} for p in pairs],
    }


if __name__ == "__main__":
    sys.exit(main())

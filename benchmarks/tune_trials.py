"""Tune different jobs on small devices, and see whether what is found is what a sweep over everything finds.

    python benchmarks/tune_trials.py --jobs 30 --out benchmarks/results/tune_trials.json

Each job has its own model, length, method, arithmetic and batch, and a device (`small_device.py`) whose limit lies
somewhere between what a single sample and what a rank's whole batch needs, or above. The sweep climbs every micro-batch
on it; then `trainwright tune` runs, from an empty store and again from the one that it left; then the finders of
accelerate and Lightning, in the same worker. Where tune's fastest and the sweep's differ, these two alone are timed
again, in turn. Workers are forked (`forked.py`). On a CPU there is no estimate: the first probe goes up to what the
rule of thumb plans. Needs `pip install pytorch-lightning`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finders import Finder, by_accelerate, by_lightning_doubling, by_lightning_halving, finding_by
from forked import forked_probes
from taken import taken

from trainwright.errors import UserError
from trainwright.job.loading import load_job
from trainwright.launch.planning import PlanFlags, plan_job
from trainwright.launch.supervision import StopAsked
from trainwright.plan.tuned import fitting
from trainwright.runs.folder import RunFolder
from trainwright.runs.writing import read_json
from trainwright.tune.probes import ProbeWatch, WorkerProbes
from trainwright.tune.search import Rung, sizes_of
from trainwright.tune.tuning import TuneOptions, tune

MOST_PROBES, MEDIAN_PROBES, WITHIN = 4, 3, 0.03
SWEEPS, DUELS = 2, 5
"""A size's time is the better of so many: another program makes a step longer and never shorter."""
NO_LIMIT_MIB = 2**20
LIBRARIES = ("trainwright", "torch", "transformers", "accelerate", "pytorch-lightning")
FINDERS: dict[str, Finder] = {
    "accelerate": by_accelerate,
    "Lightning x2": by_lightning_doubling,
    "Lightning bin": by_lightning_halving,
}
LINE = "{:3} {:38} {:>9} {:>5} {:>5} {:>6} {:>5} {:>4} {:>4} {:>7} {:>6} {:>6}" + len(FINDERS) * " {:>13}"
HEADINGS = (
    "job", "width x layers x length, method", "limit MiB", "sweep", "tune", "probes", "steps", "s", "warm",
    "fastest", "tune's", "slower", *FINDERS,
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a finder of others ended with, None where it found nothing, and how many sizes it tried."""

    micro_batch_size: int | None
    tries: int

    def __str__(self) -> str:
        return f"{self.micro_batch_size or '-'} in {self.tries}"


@dataclass(frozen=True)
class Trial:
    """One job: its largest and fastest micro-batch by the sweep and by each finder."""

    number: int
    what: str
    limit_mib: float
    sizes: tuple[int, ...]
    sweep_largest: int
    sweep_step_s: dict[int, float]
    tune_largest: int
    tune_fastest: int
    tune_probes: int
    tune_steps: int
    tune_s: float
    warm_probes: int
    slower: float
    """How much longer tune's fastest takes than the sweep's."""
    others: dict[str, Found]

    @property
    def steps_off(self) -> int:
        """How many micro-batches lie between tune's largest and the sweep's."""
        return self.sizes.index(self.tune_largest) - self.sizes.index(self.sweep_largest)

    @property
    def sweep_fastest(self) -> int:
        """The micro-batch with the shortest step."""
        return min(self.sweep_step_s, key=lambda size: self.sweep_step_s[size])

    @property
    def problems(self) -> list[str]:
        """What is not as promised."""
        found = []
        if abs(self.steps_off) > 1:
            found.append(f"tune's largest is {self.tune_largest}, the sweep's {self.sweep_largest}")
        if self.tune_probes > MOST_PROBES:
            found.append(f"{self.tune_probes} probes")
        if self.warm_probes > 1:
            found.append(f"{self.warm_probes} probes with a warm store")
        if self.slower > WITHIN:
            found.append(
                f"tune's fastest, {self.tune_fastest}, takes {self.slower:.1%} longer than {self.sweep_fastest}"
            )
        return [f"job {self.number} ({self.what}): {problem}" for problem in found]

    def __str__(self) -> str:
        return LINE.format(
            self.number,
            self.what,
            f"{self.limit_mib:.1f}",
            self.sweep_largest,
            self.tune_largest,
            self.tune_probes,
            self.tune_steps,
            f"{self.tune_s:.0f}",
            self.warm_probes,
            self.sweep_fastest,
            self.tune_fastest,
            f"{self.slower:.1%}",
            *map(str, self.others.values()),
        )


def job_of(number: int, draw: random.Random, folder: Path, bases: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Return a job, and what sets it apart from the others."""
    size, length = draw.choice(list(bases)), draw.choice([32, 64, 96, 128])
    method = draw.choice(["full", "full", "lora"])
    total = draw.choice([8, 12, 16, 20, 24, 32, 40])
    precision = draw.choice(["fp32", "fp32", "bf16"])
    optim = draw.choice(["adamw", "adafactor"])
    rows = [
        {
            "prompt": f"what is {' and '.join(str(draw.randrange(100)) for _ in range(draw.randint(1, 24)))}?",
            "response": "it",
        }
        for _ in range(160)
    ]
    data = folder / f"data-{number}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = folder / f"eval-{number}.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows[:32]))
    job = {
        "name": f"trial-{number}",
        "task": "small_device:OnSmallDevice",
        "task_options": {"limit_mib": NO_LIMIT_MIB},
        "model": {"name": bases[size]},
        "data": {
            "path": str(data),
            "eval_path": str(held_out),
            "max_length": length,
            "cache_dir": str(folder / "cache"),
        },
        "method": {"type": method, **({"r": 4} if method == "lora" else {})},
        "train": {
            "global_batch_size": total,
            "optim": optim,
            "gradient_checkpointing": draw.choice([False, False, True]),
            "max_steps": 4,
        },
        "resources": {"device": "cpu", "precision": precision},
        "tracking": [],
    }
    checkpointing = ", ckpt" if job["train"]["gradient_checkpointing"] else ""  # type: ignore[index]
    return f"{size} x {length}, {method} {precision} {optim[:5]}{checkpointing}", job


def write_bases(folder: Path) -> dict[str, str]:
    """Save small models with a tokenizer, by width and layers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.BPE({char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    found = {}
    for width, layers in ((32, 1), (32, 3), (64, 1), (64, 2), (128, 1)):
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=256,
        )
        path = folder / f"base-{width}-{layers}"
        LlamaForCausalLM(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
        found[f"{width} x {layers}"] = str(path)
    return found


class Bed:
    """One job in a folder: its sweep, its tuning, and the finders of others."""

    def __init__(self, folder: Path, number: int, what: str, job: dict[str, Any]) -> None:
        self._folder, self._number, self._what = folder, number, what
        self._path = folder / f"job-{number}.yaml"
        self._path.write_text(json.dumps(job))
        self._share = job["train"]["global_batch_size"]
        self._sizes = sizes_of(self._share)

    def trial(self, draw: random.Random) -> Trial:
        """Draw a limit, and let each find what it can."""
        alone, whole = (rung.needed_bytes or 0 for rung in self._climb(NO_LIMIT_MIB, (1, self._share)))
        limit_mib = (alone + draw.uniform(0.03, 1.2) * (whole - alone)) / 2**20
        times = self._times(limit_mib, self._sizes, SWEEPS)
        loaded = load_job(str(self._path), self._limited(limit_mib))
        began_s = time.monotonic()
        cold = tune(loaded, TuneOptions(), open_probes=forked_probes)
        tune_s = time.monotonic() - began_s
        warm = tune(loaded, TuneOptions(), open_probes=forked_probes)
        assert cold.tuned.fastest is not None
        largest, fastest = cold.tuned.levels["extreme"], cold.tuned.fastest.micro_batch_size
        return Trial(
            number=self._number,
            what=self._what,
            limit_mib=limit_mib,
            sizes=self._sizes,
            sweep_largest=max(times),
            sweep_step_s=times,
            tune_largest=largest,
            tune_fastest=fastest,
            tune_probes=cold.tuned.probes,
            tune_steps=cold.tuned.steps,
            tune_s=tune_s,
            warm_probes=0 if warm.before else warm.tuned.probes,
            slower=self._slower(limit_mib, fastest, min(times, key=lambda size: times[size])),
            others={name: self._found_by(find, limit_mib) for name, find in FINDERS.items()},
        )

    def _slower(self, limit_mib: float, one: int, other: int) -> float:
        """Return how much longer a step takes at one size than at another."""
        if one == other:
            return 0.0
        times = self._times(limit_mib, tuple(sorted((one, other))), DUELS)
        return times[one] / times[other] - 1

    def _times(self, limit_mib: float, sizes: tuple[int, ...], climbs: int) -> dict[int, float]:
        """Return the seconds of a step at each size that the memory suffices for."""
        times: dict[int, float] = {}
        for rung in (rung for _ in range(climbs) for rung in self._climb(limit_mib, sizes)):
            step_s = rung.step_s(-(-self._share // rung.micro_batch_size))
            assert step_s is not None
            times[rung.micro_batch_size] = min(step_s, times.get(rung.micro_batch_size, step_s))
        return times

    def _limited(self, limit_mib: float) -> list[str]:
        return [f"task_options.limit_mib={limit_mib:.6f}"]

    @contextlib.contextmanager
    def _probes(self, limit_mib: float) -> Iterator[tuple[WorkerProbes, RunFolder]]:
        job, plan, _ = plan_job(load_job(str(self._path), self._limited(limit_mib)), PlanFlags())
        with tempfile.TemporaryDirectory(prefix="tune-trials-") as place:
            folder = RunFolder(Path(place) / job.name)
            yield forked_probes(folder, job, plan, ProbeWatch(StopAsked(), 600, 0)), folder

    def _climb(self, limit_mib: float, sizes: tuple[int, ...]) -> tuple[Rung, ...]:
        """Return every micro-batch that runs under a limit."""
        with self._probes(limit_mib) as (probes, _):
            return probes.run(sizes, ()).rungs

    def _found_by(self, find: Finder, limit_mib: float) -> Found:
        """Return what a finder of others ends with, between one sample and the whole batch of the rank."""
        with self._probes(limit_mib) as (probes, folder), finding_by(find), contextlib.suppress(UserError):
            probes.run((self._share,), ())
            result = read_json(folder.path / "found.json")
            return Found(fitting(result["found"], self._share), result["tries"])
        return Found(None, 0)


def main() -> int:
    """Run the trials, print a table, write the results; 1 if anything was not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import accelerate  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401

    import trainwright.train.worker  # noqa: F401

    trials = []
    draw = random.Random(options.seed)
    print(LINE.format(*HEADINGS))
    with tempfile.TemporaryDirectory(prefix="tune-trials-") as place:
        folder = Path(place)
        for task in ("small_device.py", "hungry_task.py"):
            shutil.copy(Path(__file__).with_name(task), folder)
        os.chdir(folder)
        os.environ["XDG_DATA_HOME"] = str(folder / "home")
        bases = write_bases(folder)
        for number in range(1, options.jobs + 1):
            bed = Bed(folder, number, *job_of(number, draw, folder, bases))
            with contextlib.redirect_stderr(io.StringIO()):
                trial = bed.trial(draw)
            trials.append(trial)
            print(trial, flush=True)
    problems = [problem for trial in trials for problem in trial.problems]
    median = statistics.median(trial.tune_probes for trial in trials)
    if median > MEDIAN_PROBES:
        problems.append(f"a median of {median} probes")
    print(f"median probes {median}, median steps {statistics.median(trial.tune_steps for trial in trials)}")
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps(_record(options, trials), indent=1) + "\n")
    return 1 if problems else 0


def _record(options: argparse.Namespace, trials: list[Trial]) -> dict[str, Any]:
    return {
        **taken(f"python benchmarks/tune_trials.py --jobs {options.jobs} --seed {options.seed}", LIBRARIES),
        "median_probes": statistics.median(trial.tune_probes for trial in trials),
        "trials": [asdict(trial) | {"steps_off": trial.steps_off} for trial in trials],
    }


if __name__ == "__main__":
    sys.exit(main())

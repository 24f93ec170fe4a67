"""Tune different jobs on small devices, and see whether what is found is what a sweep over everything finds.

    python benchmarks/tune_trials.py --jobs 30 --out benchmarks/results/tune_trials.json

Each job has its own model, length, method, arithmetic and batch, and a device (`small_device.py`) whose limit lies
somewhere between what a single sample and what a rank's whole batch needs, or above. The sweep climbs every micro-batch
on it; then `trainwright tune` runs, from an empty store and again from the one that it left; then the batch-size finder
of accelerate, in the same worker. Lightning's finders are not compared.

Probes are the product's own, `trainwright.tune.tuning.tune` with the workers of `python -m trainwright.train`; but a
worker is forked from this process, in which torch and transformers are loaded already, as 200 starts of Python would
take most of the time. On a CPU there is no estimate: the first probe goes up to what the rule of thumb plans.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taken import taken

from trainwright.errors import UserError
from trainwright.job.loading import load_job
from trainwright.job.schema import Job
from trainwright.launch.beginning import write_run_files
from trainwright.launch.planning import Asked, plan_job
from trainwright.launch.processes import Processes
from trainwright.launch.supervision import StopAsked, rank_environment
from trainwright.plan.choose import Plan
from trainwright.plan.layout import Layout
from trainwright.plan.tuned import fitting
from trainwright.runs.folder import RunFolder
from trainwright.runs.writing import read_json, write_json_atomic
from trainwright.tune.probes import Watch, WorkerProbes
from trainwright.tune.search import Rung, sizes_of
from trainwright.tune.tuning import TuneOptions, tune

MOST_PROBES, MEDIAN_PROBES, WITHIN = 4, 3, 0.03
SWEEPS = 2
"""A size's time is the better of so many sweeps: another program makes a step longer and never shorter."""
NO_LIMIT_MIB = 2**20
LIBRARIES = ("trainwright", "torch", "transformers", "accelerate")
LINE = "{:3} {:38} {:>9} {:>7} {:>7} {:>6} {:>5} {:>5} {:>4} {:>8} {:>8} {:>7} {:>11} {:>9}"
HEADINGS = (
    "job", "width x layers x length, method", "limit MiB", "sweep", "tune", "probes", "steps", "s", "warm",
    "fastest", "tune's", "slower", "accelerate", "tries",
)  # fmt: skip


class Forked:
    """A worker forked from this process, as subprocess.Popen gives it."""

    def __init__(self, main: Callable[[], int], environment: dict[str, str], log: Path, run_dir: Path) -> None:
        launcher = str(os.getpid())
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self.returncode: int | None = None
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            os.environ.update(environment, TRAINWRIGHT_LAUNCHER_PID=launcher)
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            for stream in (1, 2):
                os.dup2(descriptor, stream)
            sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
            sys.argv = ["trainwright.train", str(run_dir)]
            code = main()
        finally:
            if sys.exc_info()[1] is not None:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(code)

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        """Return the exit status once it has ended."""
        while (code := self.poll()) is None:
            time.sleep(0.005)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)


def start_forked(folder: RunFolder, layout: Layout, attempt: int) -> Processes:
    """Start every rank as a fork of this process."""
    from trainwright.train.__main__ import main

    processes = Processes()
    for rank in range(layout.ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(layout.ranks)}
        environment = place | {"LOCAL_WORLD_SIZE": str(layout.ranks)} | rank_environment(layout, layout.ranks, attempt)
        processes.children.append(Forked(main, environment, folder.rank_log(attempt, rank), folder.path))  # type: ignore[arg-type]
    return processes


def forked_probes(folder: RunFolder, job: Job, plan: Plan, watch: Watch) -> WorkerProbes:
    """Return probes whose workers are forks, and whose data is prepared in one."""
    from trainwright.train.prepare import main

    folder.create()
    write_run_files(folder, job, plan.to_json())
    prepared = Forked(lambda: main([str(folder.path)]), {}, folder.path / "prepare.log", folder.path).wait()
    assert prepared == 0, (folder.path / "prepare.log").read_text()
    return WorkerProbes(folder, job, plan, watch, start_ranks=start_forked)


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
    accelerate_found: int | None
    accelerate_tries: int

    @property
    def steps_off(self) -> int:
        """How many micro-batches lie between tune's largest and the sweep's."""
        return self.sizes.index(self.tune_largest) - self.sizes.index(self.sweep_largest)

    @property
    def sweep_fastest(self) -> int:
        """The micro-batch with the shortest step."""
        return min(self.sweep_step_s, key=lambda size: self.sweep_step_s[size])

    @property
    def slower(self) -> float:
        """How much longer tune's fastest takes than the sweep's, by the sweep's own times."""
        return self.sweep_step_s[self.tune_fastest] / self.sweep_step_s[self.sweep_fastest] - 1

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
            "-" if self.accelerate_found is None else self.accelerate_found,
            self.accelerate_tries,
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
        sweeps = [self._climb(limit_mib, self._sizes) for _ in range(SWEEPS)]
        times: dict[int, float] = {}
        for rung in (rung for sweep in sweeps for rung in sweep):
            step_s = rung.step_s(-(-self._share // rung.micro_batch_size))
            assert step_s is not None
            times[rung.micro_batch_size] = min(step_s, times.get(rung.micro_batch_size, step_s))
        loaded = load_job(str(self._path), self._limited(limit_mib))
        began_s = time.monotonic()
        cold = tune(loaded, TuneOptions(), open_probes=forked_probes)
        tune_s = time.monotonic() - began_s
        warm = tune(loaded, TuneOptions(), open_probes=forked_probes)
        assert cold.tuned.fastest is not None
        found, tries = self._accelerate(limit_mib)
        return Trial(
            number=self._number,
            what=self._what,
            limit_mib=limit_mib,
            sizes=self._sizes,
            sweep_largest=max(times),
            sweep_step_s=times,
            tune_largest=cold.tuned.levels["extreme"],
            tune_fastest=cold.tuned.fastest.micro_batch_size,
            tune_probes=cold.tuned.probes,
            tune_steps=cold.tuned.steps,
            tune_s=tune_s,
            warm_probes=0 if warm.before else warm.tuned.probes,
            accelerate_found=None if found is None else fitting(found, self._share),
            accelerate_tries=tries,
        )

    def _limited(self, limit_mib: float) -> list[str]:
        return [f"task_options.limit_mib={limit_mib:.6f}"]

    @contextlib.contextmanager
    def _probes(self, limit_mib: float) -> Iterator[tuple[WorkerProbes, RunFolder]]:
        job, plan, _ = plan_job(load_job(str(self._path), self._limited(limit_mib)), Asked())
        with tempfile.TemporaryDirectory(prefix="tune-trials-") as place:
            folder = RunFolder(Path(place) / job.name)
            yield forked_probes(folder, job, plan, Watch(StopAsked(), 600, 0)), folder

    def _climb(self, limit_mib: float, sizes: tuple[int, ...]) -> tuple[Rung, ...]:
        """Return every micro-batch that runs under a limit."""
        with self._probes(limit_mib) as (probes, _):
            return probes.run(sizes, ()).rungs

    def _accelerate(self, limit_mib: float) -> tuple[int | None, int]:
        """Return what accelerate's finder ends with, beginning with the whole batch, and how often it tried."""
        from trainwright.train import worker
        from trainwright.train.probing import Probe

        def find(loop: Any, wanted: Any) -> None:
            from accelerate.utils import find_executable_batch_size

            tried = []

            @find_executable_batch_size(starting_batch_size=wanted["micro_batch_sizes"][0])  # type: ignore[untyped-decorator]
            def steps(batch_size: int) -> int:
                tried.append(batch_size)
                for _ in range(2):
                    Probe(loop, wanted).longest_step(batch_size)
                return batch_size

            write_json_atomic(loop.folder.path / "found.json", {"found": steps(), "tries": len(tried)})

        ours, worker.probe = worker.probe, find
        try:
            with self._probes(limit_mib) as (probes, folder), contextlib.suppress(UserError):
                probes.run((self._share,), ())
                result = read_json(folder.path / "found.json")
                return result["found"], result["tries"]
        finally:
            worker.probe = ours
        return None, 0


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
        "trials": [asdict(trial) | {"slower": trial.slower, "steps_off": trial.steps_off} for trial in trials],
    }


if __name__ == "__main__":
    sys.exit(main())

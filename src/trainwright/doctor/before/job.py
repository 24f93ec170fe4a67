"""Checks of a job on this machine: GPUs, batch, data, model files, output (S1-35, S4-43)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trainwright.doctor.before.check_result import Checked, ok, problem, warning
from trainwright.errors import UserError
from trainwright.hardware.reading import GIB
from trainwright.job.loading import LoadedJob
from trainwright.job.schedule import steps_per_epoch
from trainwright.job.schema import Job
from trainwright.launch.train_run import plan_here
from trainwright.model_folder import CONFIG, read_model_config, require_whole, wanted_files
from trainwright.plan.choose import Plan
from trainwright.plan.estimates import samples_in
from trainwright.plan.job_model import checkpoint_bytes
from trainwright.runs.folder import RunFolder
from trainwright.runs.writing import write_json_atomic

PARSE_TIMEOUT_S: Final = 3600
_TRACKERS: Final = {"wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard"}


def planned(loaded: LoadedJob, gpus: str | None) -> Iterator[Checked]:
    """The GPUs asked for are there, the batch fits by estimate, and every rank does its share of the steps."""
    try:
        job, plan = plan_here(loaded, gpus)
    except UserError as error:
        yield _refused("plan", error)
        return
    layout = plan.layout
    yield ok("ranks", f"Number of processes: {layout.ranks}, {layout.strategy}, {layout.precision}")
    yield from _steps(job, layout.ranks)
    yield from _fits(plan)
    yield from (warning("plan", text) for text in plan.warnings)


def _steps(job: Job, ranks: int) -> Iterator[Checked]:
    samples = samples_in(job)
    if samples is None:
        return
    batch = job.train.global_batch_size
    steps = steps_per_epoch(samples, batch, job.train.drop_last)
    a_rank = -(-samples // ranks)
    yield ok(
        "steps",
        f"{steps:,} steps an epoch of {batch} samples; each of {ranks} ranks sees about {a_rank:,} of {samples:,}",
    )


def _fits(plan: Plan) -> Iterator[Checked]:
    estimate = plan.estimate
    if estimate is None:
        yield ok("batch", f"micro-batch {plan.layout.micro_batch_size}; no estimate: {plan.no_estimate}")
    elif estimate.capacity is None:
        yield ok(
            "batch", f"micro-batch {plan.layout.micro_batch_size}: {estimate.peak_bytes / GIB:.1f} GiB by estimate"
        )
    else:
        room = estimate.capacity.total_bytes
        needs = f"{estimate.peak_bytes / GIB:.1f} of {room / GIB:.1f} GiB (estimate)"
        text = f"micro-batch {plan.layout.micro_batch_size}: {needs}"
        if estimate.peak_bytes > room:
            yield problem(
                "batch", f"{text}: it does not fit", "trainwright plan JOB shows the nearest changes that fit"
            )
        else:
            yield ok("batch", text)


def output(job: Job) -> Iterator[Checked]:
    """The output folder can be written to, and has room for two checkpoints."""
    wanted = Path(job.output_dir).absolute()
    existing = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield problem(
            "output", f"{wanted} cannot be written to: {error.strerror}", "output_dir=PATH names another folder"
        )
        return
    free = shutil.disk_usage(existing).free
    text = f"{wanted}: {free / GIB:.1f} GiB free"
    size = checkpoint_bytes(job)
    if size is None:
        yield ok("output", f"{text}; the size of a checkpoint is not known beforehand")
    elif free < 2 * size:
        fix = "free space or set output_dir=PATH; checkpoint.keep=1 keeps fewer"
        yield problem("output", f"{text}, two checkpoints need {2 * size / GIB:.1f} (the old one goes last)", fix)
    elif free < (job.checkpoint.keep + 2) * size:
        kept = job.checkpoint.keep
        text = f"{text}, checkpoint.keep={kept} will take up to {(kept + 2) * size / GIB:.1f}"
        yield warning("output", text, "checkpoint.keep=1")
    else:
        yield ok("output", f"{text}, a checkpoint takes {size / GIB:.2f} (estimate)")


def trackers(job: Job) -> Iterator[Checked]:
    """The trackers that the job names are installed."""
    for name in job.tracking:
        if importlib.util.find_spec(_TRACKERS[name]) is None:
            yield problem(
                "tracking", f"{name} is not installed", f"pip install {name}", "or leave it out of `tracking`"
            )


def data(job: Job) -> Iterator[Checked]:
    """Every row is read and tokenized, as before a run; the token cache that this makes is what the run then takes."""
    if job.data.path is None and job.script is not None:
        yield ok("data", "the job's script reads its own data")
        return
    with tempfile.TemporaryDirectory(prefix="trainwright-doctor-") as name:
        folder = RunFolder(Path(name) / job.name)
        folder.create()
        write_json_atomic(folder.resolved_json, job.model_dump(mode="json"))
        command = [sys.executable, "-m", "trainwright.train.prepare", str(folder.path)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PARSE_TIMEOUT_S,
                check=False,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "true", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            )
        except subprocess.TimeoutExpired:
            yield warning("data", f"reading the data takes more than {PARSE_TIMEOUT_S} s; not all of it was checked")
            return
    said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    if done.returncode == 0:
        yield ok("data", next((line for line in reversed(said) if line.startswith("data:")), "every row can be read"))
        return
    hints = tuple(line.removeprefix("hint: ") for line in said if line.startswith("hint: "))
    start = next((number for number, line in enumerate(said) if line.startswith("error: ")), len(said) - 1)
    message = [line.strip() for line in said[start:] if not line.startswith("hint: ")]
    yield problem("data", "; ".join(message).removeprefix("error: "), *hints)


def model_files(job: Job) -> Iterator[Checked]:
    """A local model folder is complete: config, and weights of the length that their headers state."""
    name = job.model.name
    if name is None:
        return
    folder = Path(name)
    if not folder.is_dir():
        yield from _on_hub(name)
        return
    try:
        wanted = wanted_files(folder)
        read_model_config(folder / CONFIG)
        require_whole(folder)
    except UserError as error:
        yield _refused("model", error)
        return
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        yield problem("model", f"{folder} lacks {', '.join(missing)}", "copy or download the model again")
        return
    yield ok("model", f"{folder}: config and weights are complete")


def _on_hub(name: str) -> Iterator[Checked]:
    root = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    cached = root.expanduser() / f"models--{name.replace('/', '--')}" / "snapshots"
    is_cached = any(cached.glob("*/config.json")) and any(cached.glob("*/*.safetensors"))
    if is_cached:
        yield ok("model", f"{name} is in the cache, {cached.parent}")
    elif os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "True"):
        text = f"{name} is not in the cache, and HF_HUB_OFFLINE is set"
        yield problem("model", text, f"where there is a network: huggingface-cli download {name}")
    else:
        yield warning(
            "model",
            f"{name} is not in the cache: it will be downloaded",
            f"on a login node: huggingface-cli download {name}",
        )


def _refused(check: str, error: UserError) -> Checked:
    return problem(check, "; ".join([error.message, *error.problems]), *error.hints)

"""Where metrics go: metrics.jsonl always, TensorBoard, W&B and MLflow where named."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainwright.errors import not_installed
from trainwright.job.schema import Job
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import append

Log = Callable[[int, Mapping[str, float]], None]


class Tracking:
    """Writes each step's metrics; a tracker that fails is dropped with a warning and never ends a run."""

    def __init__(self, job: Job, folder: RunFolder, *, attempt: int, resumed_step: int) -> None:
        self._path, self._attempt = folder.metrics_jsonl, attempt
        self._open = {
            "tensorboard": lambda: _tensorboard(folder.logs_dir, resumed_step),
            "wandb": lambda: _wandb(job, folder),
            "mlflow": lambda: _mlflow(job, folder),
        }
        self._logs: dict[str, Log] = {name: self._open[name]() for name in job.tracking}

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record one line of metrics; `kind` is `train` or `eval`."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        append(self._path, {"kind": kind, "attempt": self._attempt, "step": step, **finite})
        for name, log in list(self._logs.items()):
            try:
                log(step, {f"{kind}/{key}": value for key, value in metrics.items()})
            except (OSError, RuntimeError, ValueError) as error:
                print(f"warning: tracking to {name} failed and is off from here on: {error}", file=sys.stderr)
                del self._logs[name]


def _tensorboard(logs_dir: Path, resumed_step: int) -> Log:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise not_installed("tracking", "tensorboard", instead="leave it out of `tracking`") from error
    # purge_step hides what a killed attempt logged beyond the checkpoint that this one resumed from.
    writer = SummaryWriter(str(logs_dir), purge_step=resumed_step + 1 if resumed_step else None)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def _wandb(job: Job, folder: RunFolder) -> Log:
    try:
        import wandb
    except ImportError as error:
        raise not_installed("tracking", "wandb", instead="leave it out of `tracking`") from error
    # One run over all attempts; WANDB_PROJECT, WANDB_MODE and WANDB_DIR of the environment win.
    run = wandb.init(name=job.name, id=folder.run_id, resume="allow", dir=str(folder.logs_dir))
    return lambda step, metrics: run.log(dict(metrics), step=step)


def _mlflow(job: Job, folder: RunFolder) -> Log:
    try:
        import mlflow
    except ImportError as error:
        raise not_installed("tracking", "mlflow", instead="leave it out of `tracking`") from error
    found: Any = mlflow.search_runs(filter_string=f"tags.trainwright_run_id = '{folder.run_id}'", output_format="list")
    run_id = found[0].info.run_id if found else None
    mlflow.start_run(run_id=run_id, run_name=job.name, tags={"trainwright_run_id": folder.run_id})
    return lambda step, metrics: mlflow.log_metrics(dict(metrics), step=step)

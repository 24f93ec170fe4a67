"""What decides which tokens a model sees, as far as it is known before anything is read or loaded."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.errors import UserError
from trainwright.job.schema import BUILT_IN_TASKS, Job, TrainTokenizer
from trainwright.train.data.sources import Source, find_source, is_local
from trainwright.train.data.tokenizer import identity

ENCODING = 2
"""Counted up when this version makes other tokens of the same rows than the one before."""
_LIBRARIES = ("tokenizers", "transformers")


def local_source(path_or_name: str, split: str) -> Source | None:
    """Return the source if it lies on this machine; None for the hub, whose files are known only once loaded.

    Raises:
        UserError: it means a path, and there is nothing, or nothing that can be read.
    """
    return find_source(path_or_name, split) if is_local(path_or_name) else None


def data_request(job: Job) -> dict[str, Any]:
    """Return everything that decides the tokens; hub names stand for what they hold, files for their sha256.

    Raises:
        UserError: a data file is not there, or the data section contradicts itself.
    """
    data = job.data
    if data.path is None:
        raise UserError("data.path is not set", hints=["data.path=FILE names the training data"])
    if data.eval_path is not None and data.eval_split > 0:
        raise UserError(
            "data.eval_path and data.eval_split both say where evaluation data come from",
            hints=["remove one of them: data.eval_split=0"],
        )
    seeded = data.eval_split > 0 or isinstance(job.model.tokenizer, TrainTokenizer)
    return {
        "encoding": ENCODING,
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "task": job.task,
        "task_options": job.task_options,
        "task_source": _sha256(task_file(job.task)),
        "tokenizer": identity(job),
        "train": _contents(data.path, data.split),
        "eval": None if data.eval_path is None else _contents(data.eval_path, data.split),
        "eval_split": data.eval_split,
        "seed": job.train.seed if seeded else None,
        "columns": dict(data.columns),
        "template": data.template,
        "loss_on": data.loss_on,
        "max_length": data.max_length,
        "too_long": data.too_long,
        "packing": data.packing,
        "limit": data.limit,
    }


def sha256_of(value: Mapping[str, Any]) -> str:
    """Return the sha256 of a JSON object, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _contents(path_or_name: str, split: str) -> dict[str, Any]:
    source = local_source(path_or_name, split)
    if source is None:
        return {"hub": path_or_name, "split": split}
    return {"kind": source.kind, "sha256": source.digests()}


def task_file(task: str) -> Path | None:
    """Return the file that holds a user's own task, found but not run; None for the built-in ones."""
    if task in BUILT_IN_TASKS or ":" not in task:
        return None
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        spec = importlib.util.find_spec(task.split(":")[0])
    except ModuleNotFoundError:
        return None  # load_task says so, with what to do
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _sha256(path: Path | None) -> str | None:
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()

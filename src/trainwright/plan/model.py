"""The model of a job as dimensions: made from scratch, in a local folder, or in the bundled catalogue."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trainwright.anatomy import Anatomy, anatomy, read_config
from trainwright.anatomy.adapters import Lora, adapter_parameters
from trainwright.anatomy.catalog import find
from trainwright.anatomy.config import ImpossibleConfigError
from trainwright.anatomy.parameters import trainable_parameters
from trainwright.anatomy.quantized import quantized_matrices
from trainwright.errors import UserError
from trainwright.job.schema import BUILT_IN_TASKS, Job, TrainTokenizer
from trainwright.model_folder import CONFIG, read_model_config, require_plain, require_whole


@dataclass(frozen=True)
class PlannedModel:
    """What an estimate needs of a model: its config for the traced step, its anatomy for the closed form."""

    config: dict[str, Any]
    anatomy: Anatomy


@dataclass(frozen=True)
class NoEstimate:
    """Why a job cannot be estimated, as a plain sentence."""

    reason: str


def model_of(job: Job) -> PlannedModel | NoEstimate:
    """Return the dimensions of the job's model, or why they are not known.

    Raises:
        UserError: the model's files are broken, so that nothing can be made of them; with their names.
    """
    if not job.model.is_named:
        return NoEstimate("the job names no model, and what its script computes is not known")
    _require_usable(job)
    if job.task not in BUILT_IN_TASKS:
        return NoEstimate(f"what a step of the task `{job.task}` computes is not known")
    try:
        raw = _from_scratch(job) if job.model.from_scratch is not None else _named(str(job.model.name))
        if raw is None:
            return NoEstimate(
                f"the dimensions of `{job.model.name}` are not in the catalogue; name a folder with its config.json"
            )
        from_scratch = job.model.from_scratch is not None
        return PlannedModel(raw, anatomy(read_config(raw, from_scratch=from_scratch)))
    except ImpossibleConfigError as error:
        if job.model.name is None:
            raise
        raise UserError(
            f"{Path(job.model.name) / CONFIG}: {error.message}",
            problems=error.problems,
            hints=["correct these values, or name another model"],
        ) from error
    except UserError as error:
        return NoEstimate(error.message)


def what_stays_unpacked(job: Job, model: PlannedModel) -> str | None:
    """Return what QLoRA does not make small in a mixture of experts, None for other models and methods."""
    kinds = {weight.kind for _, weight in model.anatomy.weights()}
    if job.method.type != "qlora" or "experts" not in kinds:
        return None
    packed = sum(quantized_matrices(model.anatomy).values())
    whole = sum(map(prod, model.anatomy.parameters().values()))
    return (
        f"method.type=qlora packs {packed / 1e9:.1f} of {whole / 1e9:.1f} billion weights into 4 bits; the experts "
        "stay in 16, as transformers stacks them in one tensor, which bitsandbytes does not pack"
    )


def _require_usable(job: Job) -> None:
    """Check what is here of the model, whoever will load it: its config, and the length of its weights.

    Raises:
        UserError: with the file's name.
    """
    if job.model.from_scratch is not None:
        require_plain(job.model.from_scratch.dimensions, "model.from_scratch.dimensions")
    for name in (job.model.name, job.method.adapter):
        if name is not None and _is_file(Path(name) / CONFIG):
            read_model_config(Path(name) / CONFIG)
        if name is not None and _is_folder(Path(name)):
            require_whole(Path(name))


def _named(name: str) -> dict[str, Any] | None:
    if _is_file(config := Path(name) / CONFIG):
        return read_model_config(config)
    entry = find(name)
    return None if entry is None else dict(entry.config)


def _is_file(path: Path) -> bool:
    """Say whether there is such a file: a name that no file system takes is one on the hub, or a mistake."""
    try:
        return path.is_file()
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _from_scratch(job: Job) -> dict[str, Any]:
    asked = job.model.from_scratch
    assert asked is not None
    return {"model_type": asked.architecture, "vocab_size": _vocabulary(job), **asked.dimensions}


def _vocabulary(job: Job) -> int:
    tokenizer = job.model.tokenizer
    if isinstance(tokenizer, TrainTokenizer):
        return tokenizer.vocab_size
    assert tokenizer is not None, "a model from scratch has a tokenizer"
    file = Path(tokenizer) / "tokenizer.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        words = content["model"]["vocab"]
        added = {entry["id"] for entry in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"the size of the vocabulary is not known: {file} cannot be read") from None
    ids = set(words.values()) if isinstance(words, dict) else set(range(len(words)))
    return len(ids | added)


def checkpoint_bytes(job: Job) -> int | None:
    """Return the size of a checkpoint: weights (adapters alone under LoRA) and two moments in fp32; None: not known."""
    try:
        model = model_of(job)
    except UserError:
        return None  # the plan and the check of the model's files say why
    if isinstance(model, NoEstimate):
        return None
    method, anatomy = job.method, model.anatomy
    if method.type != "full":
        trained = adapter_parameters(anatomy, Lora(r=method.r, targets=method.targets))
        return 12 * trained
    trained = sum(prod(shape) for shape in trainable_parameters(anatomy, method.freeze).values())
    return 4 * anatomy.parameter_count + 8 * trained

"""The model of a job: made from scratch, in a folder, in the bundled catalogue or in the hub's cache."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trainwright.anatomy import Anatomy, anatomy, read_config
from trainwright.anatomy.adapters import Lora, adapter_parameters
from trainwright.anatomy.catalog import find, near_names
from trainwright.anatomy.config import ImpossibleConfigError
from trainwright.anatomy.parameters import trainable_parameters
from trainwright.anatomy.quantized import quantized_matrices
from trainwright.anatomy.weight_shapes import ModelShapes, shapes_in_files, shapes_of_anatomy
from trainwright.errors import ExitCode, UserError
from trainwright.estimate.recorded_traces import RecordedTraces
from trainwright.estimate.traced import shapes_on_meta, torch_is_there
from trainwright.job.schema import BUILT_IN_TASKS, Job, TrainTokenizer
from trainwright.model_folder import CONFIG, read_model_config, require_plain, require_whole

AUTO_CLASSES = {"causal-lm": "AutoModelForCausalLM", "seq2seq": "AutoModelForSeq2SeqLM"}


@dataclass(frozen=True)
class PlannedModel:
    """What an estimate needs of a model: its config for the traced step, its anatomy for the closed form."""

    config: dict[str, Any]
    anatomy: Anatomy


@dataclass(frozen=True, kw_only=True)
class NoEstimate:
    """Why a step of a job cannot be estimated, as a plain sentence, and what is known of its model all the same.

    `config` is the content of its config.json, `shapes` are its parameters; `missing` is what to bring, as an error for
    a command that cannot answer without it; None where nothing that can be brought would help.
    """

    reason: str
    config: dict[str, Any] | None = None
    shapes: ModelShapes | None = None
    missing: UserError | None = None


def model_of(job: Job) -> PlannedModel | NoEstimate:
    """Return the dimensions of the job's model, or why they are not known; see `sized` for its parameters.

    Raises:
        UserError: the model's files are broken, so that nothing can be made of them; with their names.
    """
    if not job.model.is_named:
        return NoEstimate(reason="the job names no model, and what its script computes is not known")
    _require_usable(job)
    if job.task not in BUILT_IN_TASKS:
        return NoEstimate(reason=f"what a step of the task `{job.task}` computes is not known")
    config: dict[str, Any] | None = None
    from_scratch = job.model.from_scratch is not None
    try:
        config = _from_scratch(job) if from_scratch else _named(str(job.model.name), job.model.revision)
        return PlannedModel(config, anatomy(read_config(config, from_scratch=from_scratch)))
    except ImpossibleConfigError as error:
        if job.model.name is None:
            raise
        raise UserError(
            f"{Path(job.model.name) / CONFIG}: {error.message}",
            problems=error.problems,
            hints=["correct these values, or name another model"],
        ) from error
    except UserError as error:
        return NoEstimate(reason=error.message, config=config, missing=error)


def require_model(job: Job) -> None:
    """Refuse a model of which nothing is found; a script of the user's own may know more of it.

    Raises:
        UserError: exit code 4, with how to get its config.json.
    """
    found = model_of(job)
    if isinstance(found, NoEstimate) and found.missing is not None and found.config is None and job.script is None:
        raise found.missing


def sized(job: Job, found: PlannedModel | NoEstimate, given: RecordedTraces | None = None) -> NoEstimate:
    """Return a model that is not estimated with its parameters, from what there is to read them from.

    A description comes first, then what was `given` of it, then transformers (in a process of its own, where torch is
    installed), then the headers or the index of safetensors files.
    """
    if isinstance(found, PlannedModel):
        reason = "activations and time are estimated for NVIDIA GPUs"
        return NoEstimate(reason=reason, config=found.config, shapes=shapes_of_anatomy(found.anatomy))
    if found.config is None:
        return found
    refused = None
    if given is not None or (torch_is_there() and found.config.get("quantization_config") is None):
        try:
            shapes = shapes_on_meta(found.config, AUTO_CLASSES[job.task], given)
            return NoEstimate(reason=found.reason, config=found.config, shapes=shapes)
        except UserError as error:
            refused = error if error.exit_code is not ExitCode.FAILED else None
    folder = None if job.model.name is None else _folder(job.model.name, job.model.revision)
    shapes_in = None if folder is None else shapes_in_files(folder, found.config)
    if shapes_in is not None and refused is None:
        return NoEstimate(reason=found.reason, config=found.config, shapes=shapes_in)
    return NoEstimate(reason=found.reason, config=found.config, missing=_unsized(job, found, refused))


def _unsized(job: Job, found: NoEstimate, refused: UserError | None) -> UserError:
    assert found.config is not None
    if refused is not None:
        return UserError(
            f"{found.reason}, and transformers cannot build the model to count its parameters",
            problems=[refused.message, *refused.problems],
            hints=["a newer transformers may know it: pip install -U transformers", *refused.hints],
            exit_code=ExitCode.MISSING,
        )
    if found.config.get("quantization_config") is not None:
        return UserError(
            f"{found.reason}, and its weights are stored quantized: what they take is not known",
            hints=["name the model that was quantized, whose weights are whole"],
            exit_code=ExitCode.MISSING,
        )
    hints = ["install torch and transformers here (pip install 'trainwright[train]'): the model is then counted"]
    if job.model.name is not None:
        hints.append("or put its *.safetensors, or model.safetensors.index.json alone, beside its config.json")
    return UserError(f"{found.reason}, and so is its number of parameters", hints=hints, exit_code=ExitCode.MISSING)


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
        if name is not None and _is_dir(Path(name)):
            require_whole(Path(name))


def _named(name: str, revision: str | None) -> dict[str, Any]:
    folder = _folder(name, revision)
    entry = None if folder is not None and Path(name).is_dir() else find(name)
    if entry is not None:
        return dict(entry.config)
    if folder is None:
        raise no_model(name)
    file = folder / CONFIG
    content = read_model_config(file)
    if not isinstance(content.get("model_type"), str):
        of_diffusers = content.get("_class_name")
        kind = f" (it is of a diffusers model, {of_diffusers})" if isinstance(of_diffusers, str) else ""
        raise UserError(
            f"{file} names no model_type{kind}, and so transformers cannot load the model",
            hints=["name the folder of a text model, whose config.json says its model_type"],
            exit_code=ExitCode.MISSING,
        )
    return content


def no_model(name: str) -> UserError:
    """Return the error for a name under which nothing is found, with what may have been meant and what to do."""
    if is_folder_name(name):
        return UserError(
            f"model.name: there is no folder {name}",
            hints=["the result of a run is RUN_FOLDER/final_model, and is there once the run has finished"],
            exit_code=ExitCode.MISSING,
        )
    near = near_names(name)
    return UserError(
        f"model.name: nothing is known of `{name}`: it is no folder here, not in the catalogue and not in the hub's "
        "cache",
        hints=[
            *([f"did you mean {' or '.join(near)}?"] if near else []),
            f"with a network: hf download {name} config.json, and run the same command again",
            "without: copy its config.json into a folder, and set model.name=FOLDER",
        ],
        exit_code=ExitCode.MISSING,
    )


def is_folder_name(name: str) -> bool:
    """Say whether a name can only be that of a folder: names of the hub are OWNER/NAME."""
    return name.startswith(("/", "./", "../", "~")) or name.rstrip("/").count("/") > 1


def _folder(name: str, revision: str | None) -> Path | None:
    """Return the folder that holds a model: its own, or its snapshot in the hub's cache."""
    own = Path(name).expanduser()
    if _is_dir(own):
        return own
    if is_folder_name(name):
        return None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache_dir = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    stored = cache_dir / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    try:
        commit = (stored / "refs" / wanted).read_text().strip()
    except (OSError, ValueError):
        commit = wanted
    snapshot = stored / "snapshots" / commit
    return snapshot if _is_dir(snapshot) else None


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _is_file(path: Path) -> bool:
    """Say whether there is such a file: a name that no file system takes is one on the hub, or a mistake."""
    try:
        return path.is_file()
    except (OSError, ValueError):
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

"""The files besides the data that decide what a run computes: the base model's, an adapter's, an own task's.

They are found, fetched from the hub where they are not here yet, and named in prepared.json; a resume compares what
they hold. Under full fine-tuning a checkpoint has all weights, so that only the base's config is among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from trainwright.job.schema import Job
from trainwright.runs.file_hashes import file_digests

Files: TypeAlias = dict[str, dict[str, str]]
"""Paths by the key of the job that they come from, and by their name there."""

# What transformers loads: no other weights that a hub repository may hold beside them, often a second time.
_LOADED: Final = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")


def base_folder(job: Job, commit: str | None) -> tuple[Path | None, str | None]:
    """Return the folder that holds the base model's files, and the hub's commit where it is one of the hub's.

    `commit` is the one that the run began with, None at its beginning. Weights that are not here are downloaded. The
    folder is None for a model from scratch, and where the hub gives nothing; the ranks then say why.
    """
    name = job.model.name
    if name is None:
        return None, None
    if Path(name).is_dir():
        return Path(name).absolute(), None
    from huggingface_hub import snapshot_download

    try:
        if commit is not None:
            here = Path(snapshot_download(name, revision=commit, allow_patterns=_LOADED, local_files_only=True))
            if any(here.glob("*.safetensors")):
                return here, commit
        here = Path(snapshot_download(name, revision=commit or job.model.revision, allow_patterns=_LOADED))
    except (OSError, ValueError):
        return None, commit
    return here, here.name


def deciding_files(job: Job, base: Path | None, task_source: Path | None) -> Files:
    """Return the files whose contents a resume compares."""
    files: Files = {}
    if base is not None:
        patterns = ["config.json"]
        if job.method.type != "full":
            patterns += ["adapter_config.json", "*.safetensors", "*.safetensors.index.json"]
        files["model.name"] = {path.name: str(path) for pattern in patterns for path in sorted(base.glob(pattern))}
    # The adapter's weights are in every checkpoint; how they are applied is not.
    if job.method.adapter is not None and (config := Path(job.method.adapter) / "adapter_config.json").is_file():
        files["method.adapter"] = {config.name: str(config.absolute())}
    if task_source is not None:
        files["task"] = {task_source.name: str(task_source)}
    return {key: found for key, found in files.items() if found}


def read_once(files: Files) -> None:
    """Hash the files, so that the launcher, which asks next, need not read them.

    Raises:
        UserError: one cannot be read.
    """
    file_digests(Path(path) for found in files.values() for path in found.values())


def token_ids(tokenizer: Any) -> Mapping[str, int | None]:
    """Return what a model takes from its tokenizer besides the tokens of the data."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {"vocabulary": len(tokenizer)} | {name: getattr(tokenizer, name) for name in names}

"""The run's tokenizer: loaded, or trained on the run's own texts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.job.schema import Job, TrainTokenizer
from trainwright.model_folder import loading_errors
from trainwright.runs.writing import TEMPORARY_PREFIX

SAMPLED_ROWS = 200_000
"""More rows change the merges of a vocabulary of usual size hardly at all."""
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
SMALLEST_VOCABULARY = 300
# Files of a tokenizer folder that say how text becomes tokens, in all formats that transformers reads.
_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def tokenizer_source(job: Job) -> tuple[str, str | None]:
    """Return the folder or hub name of the tokenizer to load, and its revision.

    The model's revision is the tokenizer's too, if the tokenizer is the model's own.
    """
    chosen = job.model.tokenizer
    assert not isinstance(chosen, TrainTokenizer)
    if chosen is not None:
        return chosen, None
    assert job.model.name is not None
    return job.model.name, job.model.revision


def identity(job: Job) -> dict[str, Any]:
    """Return what the job says about its tokenizer, with the contents of a local folder, without loading anything."""
    if isinstance(job.model.tokenizer, TrainTokenizer):
        return {"vocab_size": job.model.tokenizer.vocab_size}
    name, revision = tokenizer_source(job)
    folder = Path(name).expanduser()
    return {"folder": folder_sha256(folder)} if folder.is_dir() else {"hub": name, "revision": revision}


def folder_sha256(folder: Path) -> str:
    """Return the sha256 over a folder's tokenizer files and their names."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _FILES for path in folder.glob(pattern)}):
        if path.suffixes != [".safetensors", ".index", ".json"]:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """Return the tokenizer in a folder or on the hub; code that came with it is never run.

    Raises:
        UserError: it is not there, or transformers cannot read it without running its code.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name,
            revision=revision,
            trust_remote_code=False,
        )
    except loading_errors() as error:
        where = f"the folder {name}" if Path(name).expanduser().is_dir() else f"`{name}`"
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the tokenizer cannot be loaded from {where}: {first}",
            hints=[
                "model.tokenizer names a folder with tokenizer.json, or a tokenizer of the hub",
                "without a network, a hub tokenizer must be in the cache (HF_HUB_CACHE)",
            ],
            exit_code=ExitCode.MISSING,
        ) from error


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, ends_with_eos: bool) -> Any:
    """Return a byte-level BPE tokenizer trained on `texts`, which are read once; the same texts give the same one.

    Digits are tokens of their own, so that numbers are spelled alike wherever they stand. It begins a text with
    `<bos>`, or ends it with `<eos>` if `ends_with_eos`, as encoder-decoders are used to.

    Raises:
        UserError: `vocab_size` has no room for the 256 bytes and the special tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"model.tokenizer.vocab_size is {vocab_size}; at least {SMALLEST_VOCABULARY} are needed")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    added = SPECIAL_TOKENS["eos_token" if ends_with_eos else "bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {added}" if ends_with_eos else f"{added} $A",
        pair=f"$A {added} $B {added}" if ends_with_eos else f"{added} $A $B",
        special_tokens=[(added, tokenizer.token_to_id(added))],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def texts_of(value: object) -> Iterator[str]:
    """Yield every text in a row: its values, and those in lists and messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_of(inner)


def ensure_pad_token(tokenizer: Any) -> str | None:
    """Give the tokenizer a padding token if it has none, and return what was done, for people.

    Padding is masked in attention and loss, so that which token it is has no effect on what is learned.

    Raises:
        UserError: there is no end-of-sequence token to take for it either.
    """
    if tokenizer.pad_token_id is not None:
        return None
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has neither a pad_token nor an eos_token", hints=["set one in its folder"])
    tokenizer.pad_token = tokenizer.eos_token
    return f"the tokenizer has no pad_token; its eos_token {tokenizer.eos_token} is taken, and masked where it pads"


def content_sha256(tokenizer: Any) -> str:
    """Return the sha256 over all that decides how texts and chats become tokens."""
    parts = {
        "class": type(tokenizer).__name__,
        "vocabulary": tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else sorted(tokenizer.get_vocab().items()),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "begins": tokenizer("")["input_ids"],
        "chat_template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer to `folder` in the Hugging Face format, in place of what is there."""
    unfinished = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer.save_pretrained(unfinished)
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)

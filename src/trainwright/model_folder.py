"""A model's files as they come from somewhere else: read within bounds, and refused where they ask for code.

config.json is an input like any other. transformers takes from it which attention to compute with, and `owner/kernel`
there means a kernel that it loads from the hub; who loads a model here has chosen none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from trainwright.errors import ExitCode, UserError

CONFIG: Final = "config.json"
LARGEST_CONFIG_BYTES: Final = 16 * 2**20
"""The largest known, with thousands of class names, have two."""
LARGEST_HEADER_BYTES: Final = 100_000_000
"""As the safetensors library has it."""
MOST_LAYERS: Final = 10_000
LARGEST_SIZE: Final = 2**24
"""Of any one dimension: the longest published context is 10,485,760 positions."""
_DEEPEST: Final = 32
_LAYERS: Final = re.compile(r"(^|_)layers?$")
_SIZES: Final = re.compile(r"(^|_)(size|dim|embd|layers?|heads|positions|embeddings|experts|inner|d_model|d_ff|d_kv)$")
_IMPLEMENTATION: Final = re.compile(r"_?(attn|experts)_implementation(_internal)?")
# Those of transformers and torch themselves. A flash attention that is not installed would come from the hub too.
_BUILT_IN: Final = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
_CODE: Final = ("_auto_class", "use_kernels", "kernel_config")


def read_model_config(path: Path) -> dict[str, Any]:
    """Return what a config.json holds.

    Raises:
        UserError: it is not there, is no JSON object, has impossible values, or names code; with the file's name.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} has no {path.name}", hints=["name the folder of a model"], exit_code=ExitCode.MISSING
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", exit_code=ExitCode.MISSING) from error
    if len(text) > LARGEST_CONFIG_BYTES:
        raise _broken(path, f"it is larger than {LARGEST_CONFIG_BYTES // 2**20} MiB")
    try:
        content = json.loads(text)
    except RecursionError:
        raise _broken(path, "it is nested too deeply") from None
    except ValueError as error:
        raise _broken(path, f"it is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise _broken(path, "it holds no JSON object")
    require_plain(content, str(path))
    return content


def require_plain(config: Mapping[str, Any], where: str) -> None:
    """Refuse a model's config with impossible dimensions, or one that names code to be run.

    Raises:
        UserError: all such values at once; `where` is the file, or the key of the job, that holds them.
    """
    impossible, code = [], []
    for name, key, value in _values(config, "", 0):
        if isinstance(value, float) and not math.isfinite(value):
            impossible.append(f"{name}: must be a number, not {value}")
        elif _SIZES.search(key) and (problem := _size_problem(key, value)):
            impossible.append(f"{name}: {problem}")
        if (_IMPLEMENTATION.fullmatch(key) and value not in _BUILT_IN) or (key in _CODE and value):
            code.append(f"{name}: {str(value)[:80]}")
    if code:
        raise UserError(
            f"{where} names code that would be loaded to run the model",
            problems=code,
            hints=[
                f"remove the key from {where}",
                "model.attn_implementation=flash_attention_2 in the job asks for the package that is installed here",
            ],
        )
    if impossible:
        raise UserError(f"{where} has impossible values", problems=impossible[:10], hints=["correct these values"])


def require_safe(name: str, revision: str | None = None) -> None:
    """Check a model before a library loads it: a folder, or a hub name, whose config is fetched if it is not here.

    The base of an adapter is checked with it. What is not there is left to the library, which says so.

    Raises:
        UserError: as `read_model_config` and, for a folder, `require_whole`.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        require_whole(folder)
    config, adapter = (_found(folder, name, revision, file) for file in (CONFIG, "adapter_config.json"))
    if config is not None:
        read_model_config(config)
    elif adapter is not None:
        base = read_model_config(adapter).get("base_model_name_or_path")
        # An adapter whose base is itself would be followed for ever.
        if isinstance(base, str) and base and Path(base) not in (folder, Path(name)):
            require_safe(base)


def loading_errors() -> tuple[type[Exception], ...]:
    """Return what transformers and its libraries raise over the files of a model that they cannot use.

    A RuntimeError may also mean that memory ran out: ask `is_out_of_memory` first.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    in_python = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError)
    return (*in_python, StrictDataclassError, SafetensorError)


def _found(folder: Path, name: str, revision: str | None, file: str) -> Path | None:
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except (OSError, ValueError):
        return None


def wanted_files(folder: Path) -> list[str]:
    """Return the names of the files that a model's folder must have: its config, and its weights in safetensors.

    Raises:
        UserError: the index of the weights cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return [CONFIG, "model.safetensors"]
    try:
        with index.open("rb") as file:
            shards = set(json.loads(file.read(LARGEST_HEADER_BYTES))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shards = {None}
    if not all(isinstance(name, str) and "/" not in name and name.isprintable() for name in shards):
        raise UserError(f"{index} cannot be read", hints=["copy or download the model again"])
    return [CONFIG, *sorted(shards)]


def require_whole(folder: Path) -> None:
    """Check that a folder's safetensors files are as long as their headers say.

    Raises:
        UserError: the files that are not, all at once.
    """
    cut = [f"{path}: {why}" for path in sorted(folder.glob("*.safetensors")) if (why := cut_short(path)) is not None]
    if cut:
        raise UserError(
            f"the weights in {folder} are incomplete",
            problems=cut,
            hints=["copy or download them again"],
            exit_code=ExitCode.MISSING,
        )


def cut_short(path: Path) -> str | None:
    """Compare a safetensors file's length with what its header says (8 bytes of header length, header, tensors).

    Return what is wrong, None for a whole file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or 8 + length > size:
            return f"it has {size:,} bytes, less than its own header"
        if length > LARGEST_HEADER_BYTES:
            return f"its header has {length:,} bytes, more than {LARGEST_HEADER_BYTES:,}"
        try:
            entries = json.loads(file.read(length))
            ends = [int(entry["data_offsets"][1]) for key, entry in entries.items() if key != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError):
            return "its header cannot be read"
    whole = 8 + length + max(ends, default=0)
    return None if size == whole else f"it has {size:,} bytes of {whole:,}"


def _values(value: Any, name: str, depth: int) -> Iterator[tuple[str, str, Any]]:
    """Yield each value that is no object, with its dotted name and its own key; lists go on under their name."""
    if depth > _DEEPEST:
        yield name, "", math.inf
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            own = str(key)
            if not isinstance(inner, Mapping | list):
                yield f"{name}{own}", own, inner
            elif _IMPLEMENTATION.fullmatch(own) or own in _CODE:
                # One for each part of the model.
                yield from ((f"{name}{own}", own, part) for part in _leaves(inner, depth))
            else:
                yield from _values(inner, f"{name}{own}." if isinstance(inner, Mapping) else f"{name}{own}", depth + 1)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, Mapping | list):
                yield from _values(inner, f"{name}." if isinstance(inner, Mapping) else name, depth + 1)
            else:
                yield name, "", inner


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if depth > _DEEPEST:
        yield "nested too deeply"
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(inner, depth + 1)
    else:
        yield value


def _size_problem(key: str, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    most = MOST_LAYERS if _LAYERS.search(key) else LARGEST_SIZE
    if value > most:
        return f"must be {most:,} at most, not {value:,}"
    return f"must be at least 0, not {value}" if value < 0 and _LAYERS.search(key) else None


def _broken(path: Path, why: str) -> UserError:
    return UserError(f"{path} cannot be used: {why}", hints=["restore the file, or name another model"])

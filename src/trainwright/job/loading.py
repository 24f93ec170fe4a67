"""From a job file or a preset, and overrides, to a Job and the origin of each of its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from trainwright.errors import UserError
from trainwright.job.origins import KeyPath, Origin, dotted
from trainwright.job.overrides import with_overrides
from trainwright.job.preset import GUIDES, PREFIX, preset_text
from trainwright.job.problems import forbidden_content, in_order, invalid_file, schema_problems
from trainwright.job.schema import Job
from trainwright.job.shape import JOB, FileKind, M
from trainwright.job.yaml_document import Document, read_file, read_keys

__all__ = ["LoadedJob", "Origin", "load_job", "validated"]

_MAYBE_PATHS = {"model": ("name", "tokenizer"), "data": ("path", "eval_path"), "method": ("adapter",)}
"""Values that are a file or folder where one of that name exists, and otherwise the name of something on the hub."""


@dataclass(frozen=True)
class LoadedJob:
    """A valid job, and where each of its values comes from, by dotted key."""

    job: Job
    origins: Mapping[str, Origin]


def load_job(source: str, overrides: Sequence[str] = ()) -> LoadedJob:
    """Return the job of a YAML file or of `preset:NAME`, with overrides laid over it.

    File and folder names in it count from the current directory, like those on the command line, and are absolute
    in the result. Raises UserError with all problems at once, each as `file:line:column: key: problem`.
    """
    document = _document(source)
    if document.readable:
        document = with_overrides(document, overrides)
    job = _with_absolute_paths(validated(source, document, JOB))
    return LoadedJob(job, _origins(job, document))


def validated(source: str, document: Document, kind: FileKind[M]) -> M:
    """Return what a document of keys describes; raises UserError with all problems at once."""
    if not document.readable:
        raise invalid_file(source, kind, document.problems)
    problems, hints = forbidden_content(document)
    problems = document.problems + problems
    described = None
    try:
        described = kind.model.model_validate(document.values)
    except ValidationError as error:
        of_schema, of_names = schema_problems(error, document, kind)
        # What is refused already needs no second line, and a secret must not be quoted in one.
        refused = {problem.path for problem in problems}
        problems += [problem for problem in of_schema if problem.path not in refused]
        hints += of_names
    if described is None or problems:
        raise invalid_file(source, kind, in_order(problems, document), hints)
    return described


def _document(source: str) -> Document:
    kind: Literal["preset", "file"] = "preset" if source.startswith(PREFIX) else "file"
    if kind == "file" and source in GUIDES and not Path(source).exists():
        raise UserError(f"there is no job file `{source}`", hints=[f"the preset of that name is `{PREFIX}{source}`"])
    if kind == "preset":
        text = preset_text(source.removeprefix(PREFIX))
    else:
        text = read_file(Path(source), JOB.noun, where=JOB.where)
    return read_keys(text, lambda line, column: Origin(kind, f"{source}:{line}:{column}"))


def _with_absolute_paths(job: Job) -> Job:
    changed = {}
    for section_name, keys in _MAYBE_PATHS.items():
        section = getattr(job, section_name)
        changed[section_name] = section.model_copy(update={key: _absolute(getattr(section, key)) for key in keys})
    return job.model_copy(update=changed)


def _absolute(value: Any) -> Any:
    """Return the absolute path of an existing file or folder, and any other value as it is."""
    if not isinstance(value, str) or not value:
        return value
    try:
        path = Path(value).expanduser() if value.startswith("~/") else Path(value)
        return str(path.absolute()) if path.exists() else value
    except (OSError, RuntimeError):
        # A name too long for the file system, a folder we may not look into, a user without a home: no file of ours.
        return value


def _origins(job: Job, document: Document) -> dict[str, Origin]:
    values = job.model_dump(mode="json")
    return {dotted(path): document.origins.get(path, Origin("default")) for path, _ in leaves(values)}


def leaves(values: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every key path that holds a value of its own, and the value; an empty mapping is one, a list is one."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value

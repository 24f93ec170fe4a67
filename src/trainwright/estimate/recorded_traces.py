"""What torch told of one model, kept on the user's machine, or handed over in a file: its parameters, traced steps.

One file a model and versions of libraries, `traces/<hash>.json`. It holds the model's config and figures, no paths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainwright.anatomy.weight_shapes import ModelShapes
from trainwright.errors import ExitCode, UserError
from trainwright.estimate.figures import PARTS
from trainwright.estimate.request import Request
from trainwright.runs.user_data import user_data_dir
from trainwright.runs.writing import write_json_atomic

SCHEMA_VERSION = 1
LARGEST_FILE_BYTES = 32 * 2**20
MOST_STEPS = 256
"""The first ones go when there are more."""
LIBRARIES = ("trainwright", "torch", "transformers", "peft")
"""Those that decide what a step takes, or what is made of it."""
_MOST_BYTES = 2**50


@dataclass(frozen=True)
class RecordedTraces:
    """Answers about the model of `config`; `steps` by `step_key`, as `estimate.trace.answer` gives them."""

    config: Mapping[str, Any]
    auto_class: str
    versions: Mapping[str, str]
    shapes: ModelShapes | None = None
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    file: Path | None = None
    """Where it was read, of one that was handed over."""

    def is_of(self, config: Mapping[str, Any], auto_class: str) -> bool:
        """Whether it tells of this model."""
        return self.config == config and self.auto_class == auto_class

    def step(self, request: Request) -> Mapping[str, Any] | None:
        """Return the answer to a request, None where it was never asked."""
        return self.steps.get(step_key(request)) if self.is_of(request.config, request.auto_class) else None

    def with_step(self, request: Request, answer: Mapping[str, Any]) -> RecordedTraces:
        """Return it with one more answer."""
        kept = {"peak": answer["peak"], "evaluation": answer.get("evaluation")}
        steps = {**self.steps, step_key(request): kept}
        return dataclasses.replace(self, steps=dict(list(steps.items())[-MOST_STEPS:]))

    def keep(self) -> None:
        """Write it to the user's folder; that it cannot be written is no reason to end a plan."""
        shapes = None
        if self.shapes is not None and self.shapes.linear is not None:
            parameters = {name: list(shape) for name, shape in self.shapes.parameters.items()}
            shapes = {"parameters": parameters, "linear": sorted(self.shapes.linear)}
        data = {
            "schema_version": SCHEMA_VERSION,
            "config": dict(self.config),
            "auto_class": self.auto_class,
            "versions": dict(self.versions),
            "shapes": shapes,
            "steps": {key: dict(step) for key, step in self.steps.items()},
        }
        with contextlib.suppress(OSError, RuntimeError):
            path = path_of(self)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(path, data)


def step_key(request: Request) -> str:
    """Return what tells one request about a model from another."""
    asked = {name: value for name, value in dataclasses.asdict(request).items() if name != "config"}
    return _hash(asked)


def path_of(traces: RecordedTraces) -> Path:
    """Return where the answers about a model are kept."""
    identity = [dict(traces.config), traces.auto_class, dict(traces.versions)]
    return user_data_dir() / "traces" / f"{_hash(identity)}.json"


def kept_traces(config: Mapping[str, Any], auto_class: str) -> RecordedTraces:
    """Return what was kept of a model under the versions that are installed; nothing where a file is damaged."""
    empty = RecordedTraces(config, auto_class, installed())
    try:
        found = read_traces(path_of(empty))
    except (UserError, RuntimeError):
        return empty
    is_that = found.is_of(config, auto_class) and found.versions == empty.versions
    return dataclasses.replace(found, file=None) if is_that else empty


def installed() -> dict[str, str]:
    """Return the versions of the libraries that are here."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def read_traces(path: Path) -> RecordedTraces:
    """Read a file that `keep` wrote, here or elsewhere.

    Raises:
        UserError: it cannot be read, is too large or is no such file; with what is wrong in it.
    """
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise UserError(f"{path} is larger than {LARGEST_FILE_BYTES >> 20} MiB: it is no recording of traces")
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as a recording of traces: {error}") from error
    if problems := list(_problems(data)):
        raise UserError(
            f"{path} is no recording of traces that this version can read",
            problems=problems[:8],
            hints=["plan the job again on a machine with torch, and take the file that it names"],
        )
    shapes, versions = data["shapes"], data["versions"]
    found = None
    if shapes is not None:
        named = {name: tuple(shape) for name, shape in shapes["parameters"].items()}
        found = ModelShapes(named, frozenset(shapes["linear"]), source_of(versions))
    return RecordedTraces(data["config"], data["auto_class"], versions, found, data["steps"], path)


def require_same_model(traces: RecordedTraces, config: Mapping[str, Any], auto_class: str) -> None:
    """Raise UserError where a file that was handed over tells of another model."""
    if not traces.is_of(config, auto_class):
        raise UserError(
            f"{traces.file} was recorded of another model than the job's",
            hints=["the configs must be the same, key by key: record it with the same config.json"],
            exit_code=ExitCode.MISSING,
        )


def source_of(versions: Mapping[str, str]) -> str:
    """Return in words whose model the parameters are."""
    return f"the model as transformers {versions.get('transformers', 'of an unknown version')} builds it"


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _problems(data: Any) -> Iterator[str]:
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        yield f"schema_version: must be {SCHEMA_VERSION}"
        return
    if not isinstance(data.get("config"), dict) or not isinstance(data.get("auto_class"), str):
        yield "config, auto_class: must say what model it is of"
    versions = data.get("versions")
    if not isinstance(versions, dict) or not all(isinstance(found, str) for found in versions.values()):
        yield "versions: must be those of the libraries, by name"
    yield from _shape_problems(data.get("shapes"))
    steps = data.get("steps")
    if not isinstance(steps, dict) or len(steps) > MOST_STEPS:
        yield f"steps: must be at most {MOST_STEPS}, by key"
        return
    for key, step in steps.items():
        yield from (f"steps.{key}: {problem}" for problem in _step_problems(step))


def _shape_problems(shapes: Any) -> Iterator[str]:
    if shapes is None:
        return
    parameters = shapes.get("parameters") if isinstance(shapes, dict) else None
    if not isinstance(parameters, dict) or not all(map(_is_shape, parameters.values())):
        yield "shapes.parameters: must be the dimensions of each, by name"
        return
    linear = shapes.get("linear")
    if not isinstance(linear, list) or any(len(parameters.get(name, ())) != 2 for name in linear):
        yield "shapes.linear: must be names of parameters of two dimensions"


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(_is_size(length) for length in shape)


def _step_problems(step: Any) -> Iterator[str]:
    peak = step.get("peak") if isinstance(step, dict) else None
    if not isinstance(peak, dict):
        yield "must have a peak"
        return
    parts = peak.get("parts_bytes")
    known = {*PARTS, "cached"}
    if not isinstance(parts, dict) or not parts.keys() <= known or not all(map(_is_size, parts.values())):
        yield "peak.parts_bytes: must be bytes by part"
        return
    if not all(isinstance(peak.get(name), str) for name in ("phase", "operator")):
        yield "peak: must say where it is"
    if peak.get("reserved_bytes") != sum(parts.values()) or not _is_size(peak.get("allocated_bytes")):
        yield "peak: its parts must add up to what is reserved"
    evaluation = step.get("evaluation")
    figures = ("requested_bytes", "reserved_bytes")
    if evaluation is not None and not (
        isinstance(evaluation, dict) and all(_is_size(evaluation.get(figure)) for figure in figures)
    ):
        yield "evaluation: must be bytes"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_BYTES

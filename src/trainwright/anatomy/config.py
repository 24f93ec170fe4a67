"""The dimensions of a model: its config.json as one small frozen dataclass per family, in the family's own words.

Aliases and defaults are those of the `configuration_*.py` files of transformers 5.23.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from trainwright.errors import UserError

TRACE_HINT = "a family that is not known here is measured by the traced step, which runs the model's own code"

_Config = TypeVar("_Config", bound="Config")


class ImpossibleConfigError(UserError):
    """Dimensions that no model has, as against a feature that is not described here."""


def derived(rule: Callable[[Any], Any], default: Any = None) -> Any:
    """A field that follows from the others where config.json leaves it out (then `default`, if any) or says null."""
    return dataclasses.field(default=default, metadata={"rule": rule})


@dataclass(frozen=True, kw_only=True)
class Config:
    """What all families share."""

    model_type: ClassVar[str]
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names that config.json may use, and the fields they mean (transformers' `attribute_map`)."""
    may_be_zero: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, Any]] = {}
    """Keys that change the architecture in ways not described here, and the only value that is."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None and "rule" in field.metadata:
                object.__setattr__(self, field.name, field.metadata["rule"](self))

    def problems(self) -> list[str]:
        """What makes these dimensions impossible, in transformers' own terms; empty when they are fine."""
        return []


def read_fields(kind: type[_Config], raw: Mapping[str, Any]) -> _Config:
    """The family's dataclass from the content of config.json; keys without influence on the dimensions are ignored.

    Raises:
        UserError: all wrong values at once, or a feature that is not described here.
    """
    only_values = {**_REFUSED_EVERYWHERE, **kind.refused}
    not_described = [f"`{key}: {raw[key]}`" for key, only in only_values.items() if raw.get(key, only) != only]
    if not_described:
        raise UserError(f"{kind.model_type} with {', '.join(not_described)} is not described here", hints=[TRACE_HINT])
    plain, aliased = _values(kind, raw)
    # transformers sets aliases after it has derived the other fields: T5 with `num_hidden_layers` alone keeps 6 decoder
    # layers.
    config = dataclasses.replace(kind(**plain), **aliased)
    if found := config.problems():
        raise ImpossibleConfigError(
            f"config.json of a `{kind.model_type}` model has impossible dimensions", problems=found
        )
    return config


def _values(kind: type[Config], raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of the family's fields: those under a field's own name, and those under another."""
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    spellings = {name: name for name in fields} | dict(kind.aliases)
    problems: list[str] = []
    plain: dict[str, Any] = {}
    aliased: dict[str, Any] = {}
    for spelling, name in spellings.items():
        if spelling not in raw:
            continue
        value = tuple(raw[spelling]) if isinstance(raw[spelling], list) else raw[spelling]
        can_be_null = "rule" in fields[name].metadata or type(None) in get_args(hints[name])
        null_is_fine = value is None and can_be_null
        if not null_is_fine and (problem := _type_problem(value, hints[name], zero=name in kind.may_be_zero)):
            problems.append(f"{spelling}: {problem}, not {value!r}")
        (plain if spelling == name else aliased)[name] = value
    if problems:
        raise ImpossibleConfigError(
            f"config.json of a `{kind.model_type}` model has impossible values", problems=problems
        )
    return plain, aliased


_REFUSED_EVERYWHERE: Mapping[str, Any] = {"per_layer_config": None, "quantization_config": None}


def unknown_family(model_type: object, known: tuple[str, ...]) -> UserError:
    """The error for a `model_type` that no family here has."""
    near = difflib.get_close_matches(str(model_type), known, n=3)
    hints = [f"did you mean {' or '.join(near)}?"] if near else []
    return UserError(
        f"the dimensions of `{model_type}` models are not known",
        hints=[*hints, f"known families: {', '.join(known)}", TRACE_HINT],
    )


def multiple_of_heads(hidden_size: int, heads: int) -> list[str]:
    """The check that transformers makes on most decoders."""
    if hidden_size % heads:
        return [f"the hidden size {hidden_size} is no multiple of the {heads} attention heads"]
    return []


def _type_problem(value: Any, hint: Any, *, zero: bool) -> str | None:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    complaints = [_one_type_problem(value, kind, zero=zero) for kind in kinds if kind is not type(None)]
    return None if None in complaints else " or ".join(filter(None, complaints))


def _one_type_problem(value: Any, kind: Any, *, zero: bool) -> str | None:
    if kind is bool:
        return None if isinstance(value, bool) else "must be true or false"
    if kind in (int, float):
        return _number_problem(value, kind, least=0 if zero or kind is float else 1)
    if get_origin(kind) is tuple:
        member = get_args(kind)[0]
        fits = isinstance(value, list | tuple) and all(_one_type_problem(v, member, zero=True) is None for v in value)
        return None if fits else "must be a list"
    return None if isinstance(value, get_origin(kind) or kind) else "is of a wrong type"


def _number_problem(value: Any, kind: type[int] | type[float], least: int) -> str | None:
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if is_number and value >= least:
        return None
    return f"must be a {'whole number' if kind is int else 'number'} of at least {least}"

"""The bundled dimensions of well-known models, for planning without a network; read from catalog.json.

A config has what its config.json states, and only fields that differ from the family's defaults. Fields without
influence on the number of parameters (window, dropout) are not checked by it.
"""

from __future__ import annotations

import difflib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainwright.anatomy import read_config
from trainwright.anatomy.config import TRACE_HINT, Config
from trainwright.errors import ExitCode, UserError
from trainwright.model_folder import CONFIG, read_model_config

MIRRORS = frozenset({"unsloth", "nousresearch", "llm-research", "ai-modelscope"})
"""Organisations of the hub and of ModelScope that publish others' models unchanged, under their own names."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PublishedCount(_Entry):
    """How many parameters a checkpoint is said to have, and by whom."""

    value: Annotated[float, Field(gt=0)]
    source: str
    places: Annotated[int, Field(ge=1)] | None = None
    """Digits that are published; None: all."""

    def agrees_with(self, count: int) -> bool:
        """Whether `count` is the number that is published, to the digits that are."""
        return self.value == (count if self.places is None else float(f"{count:.{self.places - 1}e}"))


class CatalogModel(_Entry):
    """One set of dimensions, and the models that have it."""

    config: dict[str, Any]
    """Content of config.json, without what is the default of the family."""
    parameters: PublishedCount
    """The number published for the checkpoint; a test compares it with what the dimensions give."""
    also: tuple[str, ...] = ()
    """Models with the very same dimensions."""
    unverified: bool = False
    """It agrees with its figure to some percent only, so that a dimension may be off."""


class ModelCatalog(_Entry):
    """All models by their name on the hub, and what each source is."""

    sources: dict[str, str]
    models: dict[str, CatalogModel]

    @model_validator(mode="after")
    def _sources_are_known(self) -> ModelCatalog:
        for name, model in self.models.items():
            if model.parameters.source not in self.sources:
                raise ValueError(f"{name}: source `{model.parameters.source}` is not listed under `sources`")
        return self


@cache
def catalog() -> ModelCatalog:
    """The bundled catalogue, validated once a process."""
    return ModelCatalog.model_validate_json((files("trainwright.anatomy") / "catalog.json").read_bytes())


def find(name: str) -> CatalogModel | None:
    """The entry of a hub name, or of what it mirrors, whatever its case; None when the catalogue has none."""
    organisation, _, base = name.lower().partition("/")
    found = _by_name().get(name.lower())
    return _by_base_name().get(base) if found is None and organisation in MIRRORS else found


def config_of(model: str) -> Config:
    """The dimensions of a model that a job names: a folder with config.json, or a hub name of the catalogue.

    Raises:
        UserError: the name is unknown, the file unreadable, or the family not described.
    """
    if Path(model).is_dir():
        return read_config(read_model_config(Path(model) / CONFIG))
    entry = find(model)
    if entry is None:
        near = near_names(model)
        hints = [f"did you mean {' or '.join(near)}?"] if near else []
        raise UserError(
            f"the dimensions of `{model}` are not in the catalogue",
            hints=[*hints, "name a folder that holds the model's config.json", TRACE_HINT],
            exit_code=ExitCode.MISSING,
        )
    return read_config(entry.config)


def near_names(name: str) -> list[str]:
    """The names of the catalogue that are most like one it has not."""
    return [_spelling()[close] for close in difflib.get_close_matches(name.lower(), _by_name(), n=3)]


@cache
def _by_name() -> dict[str, CatalogModel]:
    return {name.lower(): entry for key, entry in catalog().models.items() for name in (key, *entry.also)}


@cache
def _by_base_name() -> dict[str, CatalogModel]:
    """Entries by their name without the organisation, where only one has it."""
    found: dict[str, list[CatalogModel]] = {}
    for name, entry in _by_name().items():
        found.setdefault(name.partition("/")[2], []).append(entry)
    return {base: entries[0] for base, entries in found.items() if len({id(entry) for entry in entries}) == 1}


@cache
def _spelling() -> dict[str, str]:
    return {name.lower(): name for key, entry in catalog().models.items() for name in (key, *entry.also)}

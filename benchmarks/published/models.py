"""The dimensions of the models that rows name, from the bundled catalogue."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from trainwright.anatomy.catalog import catalog, find

NOT_PART_OF_THE_MODEL = frozenset(("hf", "meta", "base", "instruct", "chat", "it", "pt", "gptq", "awq", "bnb"))
"""Words of a name that say who publishes, formats, tunes or packs a model, and leave its dimensions as they are."""


def config_of(name: str) -> dict[str, Any] | None:
    """Return the config of a hub name, or of a plain one such as `Llama 2 7B`; None if it is unknown or ambiguous."""
    entry = find(name)
    if entry is not None:
        return entry.config
    configs = _by_words().get(_words(name), [])
    return configs[0] if len(configs) == 1 else None


@cache
def _by_words() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for key, model in catalog().models.items():
        for name in (key, *model.also):
            configs = found.setdefault(_words(name), [])
            if model.config not in configs:
                configs.append(model.config)
    return found


def _words(name: str) -> str:
    words = re.findall(r"[a-z]+|[0-9]+", name.rpartition("/")[2].lower())
    return "".join(word for word in words if word not in NOT_PART_OF_THE_MODEL)

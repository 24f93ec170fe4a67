"""What many prompts begin with alike (the instructions, a chat's opening), computed once and given to every batch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

LEAST_TOKENS = 16
"""A shorter beginning takes less than the copying of its keys and values."""


class Prefix:
    """The keys and values of the tokens that prompts had in common, kept until they have others in common."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # Prompts of unlike length leave a gap of padding behind the beginning. A model that is told the position of
        # each token does not see it; one that counts columns (ALiBi) would.
        parameters = inspect.signature(model.forward).parameters
        self._usable = "position_ids" in parameters and not getattr(model.config, "alibi", False)
        self._tokens: tuple[int, ...] = ()
        self._cache: DynamicCache | None = None

    def cache(self, tokens: Sequence[int], samples: int) -> DynamicCache | None:
        """Return the keys and values of `tokens` for each of `samples` prompts; None where that is of no use.

        Layers that see a window, or carry a state from token to token, count the padding: only full attention does.
        """
        if not self._usable or len(tokens) < LEAST_TOKENS or samples < 2:
            return None
        if self._cache is None or tuple(tokens) != self._tokens:
            computed = DynamicCache(config=self._model.config)
            ids = torch.tensor([list(tokens)], device=self._model.device)
            self._model(input_ids=ids, past_key_values=computed, use_cache=True, logits_to_keep=1)
            self._usable = all(type(layer) is DynamicLayer for layer in computed.layers)
            if not self._usable:
                return None
            self._cache, self._tokens = computed, tuple(tokens)
        repeated = copy.deepcopy(self._cache)
        repeated.batch_repeat_interleave(samples)
        return repeated

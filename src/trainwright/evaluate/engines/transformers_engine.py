"""The engine that runs everywhere: transformers' own generation, in batches.

On one GPU batches are transformers' continuous ones: a prompt that ends makes room for the next. Elsewhere they are
static: prompts of like length together, padded on the left, what all begin with computed once. Identical prompts are
answered once.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, set_seed

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.engines.batching import MOST_ON_CPU, MOST_ON_GPU, Room, longest_first, shared_prefix
from trainwright.evaluate.engines.continuous import generate_continuously, why_not_continuous
from trainwright.evaluate.engines.encoding import PromptEncoder
from trainwright.evaluate.engines.engine import EngineSettings, Generated
from trainwright.evaluate.engines.loading import load, out_of_memory_hints
from trainwright.evaluate.engines.prefix import Prefix

_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    # What cuDNN says when its workspace cannot be had.
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_Answer = tuple[list[int], float]
"""New tokens, and the probability of the first."""


class TransformersEngine:
    """A causal language model on a processor, an Apple GPU, a GPU, or with its layers over several."""

    name = "transformers"

    def __init__(self, settings: EngineSettings) -> None:
        set_seed(settings.seed)
        loaded = load(settings)
        self._devices = settings.devices
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._encoder = PromptEncoder(loaded.tokenizer, settings.chat_template, loaded.longest)
        self._prefix = Prefix(loaded.model)
        most = MOST_ON_CPU if settings.devices == "cpu" else MOST_ON_GPU
        self._room = Room(loaded.free_bytes, loaded.anatomy, loaded.dtype, most)
        self._batch_size = None if settings.batch_size == "auto" else settings.batch_size
        static = why_not_continuous(loaded.model)
        self._continuous = static is None
        how = "continuous batches, as on one GPU they can be" if static is None else f"static batches: {static}"
        self._notes = {"numbers": "; ".join(loaded.notes), "batching": how}

    @property
    def notes(self) -> list[str]:
        """What was chosen so far, each with its reason, a line each."""
        return [*filter(None, self._notes.values()), *self._encoder.notes]

    def close(self) -> None:
        """Give the memory back."""
        del self._model, self._prefix
        _free()

    def generate(self, prompts: Sequence[str], *, max_new_tokens: int) -> list[Generated]:
        """Return the most probable continuation of each prompt, in their order.

        Raises:
            UserError: answers are as long as all that the model reads, or not even one prompt fits into memory.
        """
        different = list(dict.fromkeys(prompts))
        if not different:
            return []
        encoded = self._encoder.encode(different, max_new_tokens)
        answers = self._continuously(encoded, max_new_tokens) if self._continuous else None
        if answers is None:
            with torch.inference_mode():
                answers = self._in_static_batches(encoded, max_new_tokens)
        texts = self._encoder.decode([tokens for tokens, _ in answers])
        generated = {
            prompt: Generated(text, len(new), len(tokens), confidence)
            for prompt, text, tokens, (new, confidence) in zip(different, texts, encoded, answers, strict=True)
        }
        return [generated[prompt] for prompt in prompts]

    def _continuously(self, encoded: list[list[int]], max_new_tokens: int) -> list[_Answer] | None:
        generated = generate_continuously(self._model, encoded, self._generation(max_new_tokens))
        if generated is None:
            self._continuous = False
            self._notes["batching"] = "static batches: transformers' continuous ones failed, and its log says why"
            _free()
            return None
        return [(self._until_stop(tokens), math.exp(logarithm)) for tokens, logarithm in generated]

    def _in_static_batches(self, encoded: list[list[int]], max_new_tokens: int) -> list[_Answer]:
        answers: list[_Answer] = [([], 0.0)] * len(encoded)
        uncut = [tokens for tokens in encoded if not self._encoder.is_full(tokens, max_new_tokens)] or encoded
        beginning = uncut[0][: shared_prefix(uncut)]
        waiting = longest_first([len(tokens) for tokens in encoded])
        if self._batch_size is None:
            self._notes["size"] = self._room.reason(len(encoded[waiting[0]]) + max_new_tokens)
        while waiting:
            longest = len(encoded[waiting[0]]) + max_new_tokens
            batch = waiting[: self._batch_size or self._room.prompts(longest)]
            generated = self._try_batch([encoded[number] for number in batch], beginning, max_new_tokens)
            if generated is None:
                self._halve(len(batch))
                continue
            for number, answer in zip(batch, generated, strict=True):
                answers[number] = answer
            del waiting[: len(batch)]
        return answers

    def _try_batch(self, batch: list[list[int]], beginning: list[int], max_new_tokens: int) -> list[_Answer] | None:
        """Return the answers to a batch, None where memory ran out."""
        try:
            return self._batch(batch, beginning, max_new_tokens)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _batch(self, batch: list[list[int]], beginning: list[int], max_new_tokens: int) -> list[_Answer]:
        """Answer one batch; padding stands on the left of what follows the beginning that all share."""
        common = len(beginning) if all(tokens[: len(beginning)] == beginning for tokens in batch) else 0
        cache = self._prefix.cache(beginning[:common], len(batch))
        start = common if cache is not None else 0
        width = max(map(len, batch))
        gaps = [width - len(tokens) for tokens in batch]
        pad = self._tokenizer.pad_token_id or 0
        rows = [tokens[:start] + [pad] * gap + tokens[start:] for tokens, gap in zip(batch, gaps, strict=True)]
        mask = [[1] * start + [0] * gap + [1] * (width - start - gap) for gap in gaps]
        first = _FirstToken()
        device = self._model.device
        output = self._model.generate(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=self._generation(max_new_tokens),
            logits_processor=LogitsProcessorList([first]),
            **({} if cache is None else {"past_key_values": cache}),
        )
        new = output[:, width:].tolist()
        return [(self._until_stop(tokens), sure) for tokens, sure in zip(new, first.probabilities, strict=True)]

    def _generation(self, max_new_tokens: int) -> Any:
        config = copy.deepcopy(self._model.generation_config)
        config.max_new_tokens = max_new_tokens
        return config

    def _until_stop(self, tokens: list[int]) -> list[int]:
        stop = self._model.generation_config.eos_token_id
        stops = set(stop) if isinstance(stop, list) else {stop}
        return tokens[: next((place for place, token in enumerate(tokens) if token in stops), len(tokens))]

    def _halve(self, size: int) -> None:
        _free()
        if size == 1:
            raise UserError(
                "not even one prompt at a time fits into memory",
                hints=out_of_memory_hints(self._devices),
                exit_code=ExitCode.OUT_OF_MEMORY,
            )
        self._batch_size = size // 2
        self._notes["memory"] = f"memory ran out with {size} prompts at a time; from here on {size // 2}"


class _FirstToken(LogitsProcessor):  # type: ignore[misc]
    """Looks at the first token's probabilities as they go by, and changes nothing."""

    def __init__(self) -> None:
        self.probabilities: list[float] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if not self.probabilities:
            self.probabilities = scores.float().softmax(-1).amax(-1).tolist()
        return scores


def is_out_of_memory(error: BaseException) -> bool:
    """Tell by its kind or words, as CUDA, Apple's GPUs and the processor's allocator each have their own."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(words in str(error) for words in _NO_MEMORY)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

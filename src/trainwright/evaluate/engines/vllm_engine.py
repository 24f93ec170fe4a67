"""The vLLM engine, written after vLLM's public API and never run by its authors: no machine of theirs had a GPU.

It batches continuously, shares beginnings and plans its memory itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

from trainwright.evaluate.engines.encoding import PromptEncoder
from trainwright.evaluate.engines.engine import EngineSettings, Generated
from trainwright.model_folder import require_safe

_DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class VllmEngine:
    """A causal language model under vLLM, on the GPUs that the process sees; several share each layer's matrices."""

    name = "vllm"

    def __init__(self, settings: EngineSettings) -> None:
        assert isinstance(settings.devices, tuple), "vLLM is chosen on CUDA alone"
        require_safe(settings.model, settings.revision)
        self._llm: Any = LLM(
            model=settings.model,
            revision=settings.revision,
            dtype=_DTYPES[settings.dtype],
            tensor_parallel_size=len(settings.devices),
            load_format="safetensors",
            trust_remote_code=False,
            # Nothing of generation_config.json: tokens are chosen greedily, without its penalties.
            generation_config="vllm",
            enable_prefix_caching=True,
            seed=settings.seed,
            **({} if settings.batch_size == "auto" else {"max_num_seqs": settings.batch_size}),
        )
        longest = self._llm.llm_engine.model_config.max_model_len
        self._encoder = PromptEncoder(self._llm.get_tokenizer(), settings.chat_template, longest)

    @property
    def notes(self) -> list[str]:
        """What was chosen, a line each."""
        return ["vLLM batches as its own memory allows", *self._encoder.notes]

    def close(self) -> None:
        """Give the memory back."""
        del self._llm

    def generate(self, prompts: Sequence[str], *, max_new_tokens: int) -> list[Generated]:
        """Return the most probable continuation of each prompt, in their order."""
        encoded = self._encoder.encode(prompts, max_new_tokens)
        outputs = self._llm.generate(
            [{"prompt_token_ids": tokens} for tokens in encoded],
            SamplingParams(temperature=0, max_tokens=max_new_tokens, logprobs=1),
            use_tqdm=False,
        )
        completions = [output.outputs[0] for output in outputs]
        texts = self._encoder.decode([list(completion.token_ids) for completion in completions])
        return [_generated(*each) for each in zip(texts, encoded, completions, strict=True)]


def _generated(text: str, prompt: Sequence[int], completion: Any) -> Generated:
    tokens = list(completion.token_ids)
    sure = math.exp(completion.logprobs[0][tokens[0]].logprob) if tokens and completion.logprobs else None
    return Generated(text, len(tokens), len(prompt), sure)

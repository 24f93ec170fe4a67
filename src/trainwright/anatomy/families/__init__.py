"""The families whose anatomy is known, by the `model_type` of their config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from trainwright.anatomy.config import Config
from trainwright.anatomy.families import early, encoders, experts, gemma3, gpt, llama, t5
from trainwright.anatomy.parts import Anatomy

_BUILDERS: Final[tuple[tuple[type[Config], Callable[[Any], Anatomy]], ...]] = (
    (llama.LlamaConfig, llama.llama),
    (llama.MistralConfig, llama.mistral),
    (llama.Qwen2Config, llama.qwen2),
    (llama.Qwen3Config, llama.qwen3),
    (llama.GemmaConfig, llama.gemma),
    (llama.Gemma2Config, llama.gemma2),
    (llama.Gemma3TextConfig, llama.gemma3_text),
    (gemma3.Gemma3Config, gemma3.gemma3),
    (llama.Phi3Config, llama.phi3),
    (gpt.PhiConfig, gpt.phi),
    (gpt.Gpt2Config, gpt.gpt2),
    (gpt.GptNeoxConfig, gpt.gpt_neox),
    (gpt.GptBigCodeConfig, gpt.gpt_bigcode),
    (gpt.Starcoder2Config, gpt.starcoder2),
    (early.MptConfig, early.mpt),
    (early.OptConfig, early.opt),
    (early.BloomConfig, early.bloom),
    (experts.MixtralConfig, experts.mixtral),
    (experts.Qwen2MoeConfig, experts.qwen2_moe),
    (experts.Qwen3MoeConfig, experts.qwen3_moe),
    (t5.T5Config, t5.t5),
    (encoders.BertConfig, encoders.bert),
    (encoders.VitConfig, encoders.vit),
)

FAMILIES: Final = {kind.model_type: (kind, build) for kind, build in _BUILDERS}

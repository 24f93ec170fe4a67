"""SmolLM3: one layer in four turns no queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainwright.anatomy.config import derived
from trainwright.anatomy.families.blocks import by_name
from trainwright.anatomy.families.llama import LLAMA, LlamaConfig
from trainwright.anatomy.families.llama_line import one_type_a_layer


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LlamaConfig):
    """`configuration_smollm3.py`; `no_rope_layers` says 1 where a layer turns them."""

    model_type = "smollm3"
    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int = derived(lambda config: config.num_attention_heads, default=4)
    use_sliding_window: bool = False
    sliding_window: int | None = None
    no_rope_layer_interval: int = 4
    no_rope_layers: tuple[int, ...] = derived(
        lambda config: tuple(int((i + 1) % config.no_rope_layer_interval != 0) for i in range(config.num_hidden_layers))
    )
    layer_types: tuple[str, ...] = derived(
        lambda config: tuple(
            "sliding_attention"
            if config.use_sliding_window and config.sliding_window and not turned
            else "full_attention"
            for turned in config.no_rope_layers
        )
    )
    tie_word_embeddings: bool = True

    @property
    def rotary_layers(self) -> tuple[bool, ...]:
        """Whether each layer turns queries and keys."""
        return tuple(map(bool, self.no_rope_layers))

    def problems(self) -> list[str]:
        """Hidden size and heads must agree; one type of attention for each layer."""
        return [*super().problems(), *one_type_a_layer(self.layer_types, self.num_hidden_layers)]


RECORDS: Final = by_name(replace(LLAMA, config=SmolLM3Config))

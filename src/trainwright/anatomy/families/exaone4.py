"""EXAONE 4: norms behind attention and MLP and of each head; layers that see all turn no queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainwright.anatomy.config import Config, derived
from trainwright.anatomy.families.blocks import by_name
from trainwright.anatomy.families.llama_line import alternating, llama_line, one_type_a_layer, split_evenly
from trainwright.anatomy.family import Family, HeadNorms, LayerNorms


@dataclass(frozen=True, kw_only=True)
class Exaone4Config(Config):
    """`configuration_exaone4.py`; without a window (1.2B) every layer turns them."""

    model_type = "exaone4"
    may_be_zero = frozenset({"sliding_window_pattern"})
    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 16384
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = derived(split_evenly)
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str = 4
    layer_types: tuple[str, ...] = derived(lambda config: alternating(config.num_hidden_layers, _period(config)))
    tie_word_embeddings: bool = False

    @property
    def rotary_layers(self) -> tuple[bool, ...]:
        """Whether each layer turns queries and keys."""
        return tuple(self.sliding_window is None or kind == "sliding_attention" for kind in self.layer_types)

    def problems(self) -> list[str]:
        """One type of attention for each layer."""
        return one_type_a_layer(self.layer_types, self.num_hidden_layers)


def _period(config: Exaone4Config) -> int:
    """Layers until the next one that sees all; a pattern may be spelt out (`LLLG`)."""
    if config.sliding_window is None or not config.sliding_window_pattern:
        return 1
    pattern = config.sliding_window_pattern
    return len(pattern) if isinstance(pattern, str) else pattern


RECORDS: Final = by_name(
    Family(
        config=Exaone4Config,
        build=llama_line,
        norms=LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        head_norms=HeadNorms(),
    )
)

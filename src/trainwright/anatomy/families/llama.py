"""Decoders of the Llama line: Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3 (text), Phi-3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from trainwright.anatomy.config import Config, derived, multiple_of_heads
from trainwright.anatomy.families.blocks import Builders, decoder, gated_mlp, head_norms, split_attention, stack
from trainwright.anatomy.parts import Anatomy, Attention, Operation, linear, norm


def split_evenly(config: Any) -> int:
    """The size of a head where the config does not name it."""
    return int(config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Config):
    """`configuration_llama.py`."""

    model_type = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = derived(lambda config: config.num_attention_heads)
    head_dim: int = derived(split_evenly)
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    def problems(self) -> list[str]:
        """Hidden size and heads must agree."""
        return multiple_of_heads(self.hidden_size, self.num_attention_heads)


@dataclass(frozen=True, kw_only=True)
class MistralConfig(Config):
    """`configuration_mistral.py`."""

    model_type = "mistral"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = derived(split_evenly)
    sliding_window: int | None = 4096
    tie_word_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(Config):
    """`configuration_qwen2.py`; queries, keys and values always have a bias."""

    model_type = "qwen2"
    may_be_zero = frozenset({"max_window_layers"})
    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = derived(lambda config: config.num_attention_heads, default=32)
    head_dim: int = derived(split_evenly)
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] = derived(
        lambda config: tuple(
            "sliding_attention" if config.use_sliding_window and i >= config.max_window_layers else "full_attention"
            for i in range(config.num_hidden_layers)
        )
    )
    tie_word_embeddings: bool = False

    def problems(self) -> list[str]:
        """One type of attention for each layer."""
        return one_type_a_layer(self.layer_types, self.num_hidden_layers)


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """`configuration_qwen3.py`; queries and keys are normalised instead."""

    model_type = "qwen3"
    head_dim: int = 128
    attention_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(Config):
    """`configuration_gemma.py`."""

    model_type = "gemma"
    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 256
    attention_bias: bool = False
    use_bidirectional_attention: bool | None = None
    tie_word_embeddings: bool = True


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    """`configuration_gemma2.py`; every other layer looks back over a window only."""

    model_type = "gemma2"
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] = derived(lambda config: alternating(config.num_hidden_layers, 2))

    def problems(self) -> list[str]:
        """Hidden size and heads must agree; one type of attention for each layer."""
        return [
            *multiple_of_heads(self.hidden_size, self.num_attention_heads),
            *one_type_a_layer(self.layer_types, self.num_hidden_layers),
        ]


@dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(Gemma2Config):
    """`Gemma3TextConfig` of `configuration_gemma3.py`; one layer in six sees all."""

    model_type = "gemma3_text"
    vocab_size: int = 262_208
    sliding_window_pattern: int = 6
    layer_types: tuple[str, ...] = derived(
        lambda config: alternating(config.num_hidden_layers, config.sliding_window_pattern)
    )


@dataclass(frozen=True, kw_only=True)
class Phi3Config(Config):
    """`configuration_phi3.py` (Phi-3, Phi-3.5, Phi-4)."""

    model_type = "phi3"
    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = derived(lambda config: config.num_attention_heads)
    head_dim: int = derived(split_evenly)
    resid_pdrop: float = 0.0
    sliding_window: int | None = None
    tie_word_embeddings: bool = False


def alternating(layers: int, period: int) -> tuple[str, ...]:
    """Windowed attention, but full attention in the last layer of each period."""
    return tuple("sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers))


def one_type_a_layer(layer_types: tuple[str, ...], layers: int) -> list[str]:
    """The check that transformers makes on `layer_types`."""
    if len(layer_types) != layers:
        return [f"layer_types names {len(layer_types)} layers, num_hidden_layers is {layers}"]
    return []


def llama(config: LlamaConfig) -> Anatomy:
    """Layers of `modeling_llama.py`."""
    attention = Attention(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return _model(config, [_block(config, attention, config.attention_bias, config.attention_bias, config.mlp_bias)])


def mistral(config: MistralConfig) -> Anatomy:
    """Layers of `modeling_mistral.py`."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    return _model(config, [_block(config, Attention(heads, groups, config.head_dim, window=config.sliding_window))])


def qwen2(config: Qwen2Config) -> Anatomy:
    """Layers of `modeling_qwen2.py`."""
    return _model(config, [_block(config, attention, qkv_bias=True) for attention in windowed(config)])


def qwen3(config: Qwen3Config) -> Anatomy:
    """Layers of `modeling_qwen3.py`."""
    norms = head_norms("self_attn.q_norm", "self_attn.k_norm", config.head_dim)
    bias = config.attention_bias
    return _model(config, [_block(config, attention, bias, bias, head_norm=norms) for attention in windowed(config)])


def gemma(config: GemmaConfig) -> Anatomy:
    """Layers of `modeling_gemma.py`."""
    causal, bias = not config.use_bidirectional_attention, config.attention_bias
    attention = Attention(config.num_attention_heads, config.num_key_value_heads, config.head_dim, causal)
    return _model(config, [_block(config, attention, bias, bias)])


def gemma2(config: Gemma2Config) -> Anatomy:
    """Layers of `modeling_gemma2.py`."""
    blocks = [_sandwiched(config, attention) for attention in windowed(config)]
    return _model(config, blocks, attention_is_eager=True)


def gemma3_text(config: Gemma3TextConfig, *, path: str = "model") -> Anatomy:
    """Layers of `modeling_gemma3.py`."""
    norms = head_norms("self_attn.q_norm", "self_attn.k_norm", config.head_dim)
    blocks = [_sandwiched(config, attention, norms) for attention in windowed(config)]
    return _model(config, blocks, path=path)


def phi3(config: Phi3Config) -> Anatomy:
    """Layers of `modeling_phi3.py`, whose projections are joined."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    queries, keys = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    block: tuple[Operation, ...] = (
        norm("input_layernorm", hidden),
        linear("self_attn.qkv_proj", "query_key_value", hidden, queries + 2 * keys, writes=("q", "k", "v")),
        Attention(heads, config.num_key_value_heads, config.head_dim, window=config.sliding_window),
        linear("self_attn.o_proj", "attention_output", queries, hidden, reads="heads"),
        norm("post_attention_layernorm", hidden),
        linear("mlp.gate_up_proj", "mlp", hidden, 2 * inner, writes="inner"),
        linear("mlp.down_proj", "mlp", inner, hidden, reads="inner"),
    )
    return _model(config, [block], dropout=config.resid_pdrop)


def windowed(config: Any) -> list[Attention]:
    """The attention of each layer, with a window where its type is `sliding_attention`."""
    causal = not getattr(config, "use_bidirectional_attention", False)
    return [
        Attention(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            causal,
            window=config.sliding_window if kind == "sliding_attention" else None,
        )
        for kind in config.layer_types
    ]


def _block(
    config: Any,
    attention: Attention,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norm: tuple[Operation, ...] = (),
) -> tuple[Operation, ...]:
    hidden = config.hidden_size
    return (
        norm("input_layernorm", hidden),
        *split_attention("self_attn", hidden, attention, qkv_bias=qkv_bias, out_bias=out_bias, head_norm=head_norm),
        norm("post_attention_layernorm", hidden),
        *gated_mlp("mlp", hidden, config.intermediate_size, bias=mlp_bias),
    )


def _sandwiched(
    config: GemmaConfig, attention: Attention, head_norm: tuple[Operation, ...] = ()
) -> tuple[Operation, ...]:
    """Gemma 2 and 3 normalise what comes out of attention and MLP too."""
    hidden, bias = config.hidden_size, config.attention_bias
    return (
        norm("input_layernorm", hidden),
        *split_attention(
            "self_attn", hidden, attention, qkv_bias=bias, out_bias=bias, head_norm=head_norm, writes="attended"
        ),
        norm("post_attention_layernorm", hidden, reads="attended", writes="tokens"),
        norm("pre_feedforward_layernorm", hidden),
        *gated_mlp("mlp", hidden, config.intermediate_size, writes="fed"),
        norm("post_feedforward_layernorm", hidden, reads="fed", writes="tokens"),
    )


def _model(
    config: Any,
    blocks: list[tuple[Operation, ...]],
    *,
    dropout: float = 0.0,
    path: str = "model",
    attention_is_eager: bool = False,
) -> Anatomy:
    """The causal language model around `blocks`; a single block stands for all layers."""
    each = blocks * config.num_hidden_layers if len(blocks) == 1 else blocks
    return decoder(
        config.model_type,
        stack(f"{path}.layers", each, dropout=dropout),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        tie=config.tie_word_embeddings,
        tokens=f"{path}.embed_tokens",
        final_norm=f"{path}.norm",
        attention_is_eager=attention_is_eager,
    )


BUILDERS: Final[Builders] = {
    LlamaConfig.model_type: (LlamaConfig, llama),
    MistralConfig.model_type: (MistralConfig, mistral),
    Qwen2Config.model_type: (Qwen2Config, qwen2),
    Qwen3Config.model_type: (Qwen3Config, qwen3),
    GemmaConfig.model_type: (GemmaConfig, gemma),
    Gemma2Config.model_type: (Gemma2Config, gemma2),
    Gemma3TextConfig.model_type: (Gemma3TextConfig, gemma3_text),
    Phi3Config.model_type: (Phi3Config, phi3),
}

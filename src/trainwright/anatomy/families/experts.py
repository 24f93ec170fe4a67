"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE.

Since transformers 5 the experts of a layer are two stacked tensors (gate and up joined, down) and the router is a bare
matrix: none of them is an `nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from trainwright.anatomy.config import Config, derived
from trainwright.anatomy.families.blocks import by_name, gated_mlp
from trainwright.anatomy.families.llama_line import llama_line, one_type_a_layer, split_evenly
from trainwright.anatomy.family import Family, HeadNorms
from trainwright.anatomy.parts import Anatomy, ModuleWeight, Operation, linear


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(Config):
    """`configuration_mixtral.py`."""

    model_type = "mixtral"
    aliases: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = derived(split_evenly)
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    tie_word_embeddings: bool = False

    def problems(self) -> list[str]:
        """A token cannot choose more experts than there are."""
        return enough_experts(self.num_experts_per_tok, self.num_local_experts)


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(Config):
    """`configuration_qwen2_moe.py`."""

    model_type = "qwen2_moe"
    may_be_zero = frozenset({"num_experts", "sliding_window", "max_window_layers"})
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = derived(lambda config: config.num_attention_heads, default=16)
    head_dim: int = derived(split_evenly)
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] = derived(
        lambda config: tuple(
            "sliding_attention"
            if config.use_sliding_window and layer % 2 == 0 and layer < config.max_window_layers
            else "full_attention"
            for layer in range(config.num_hidden_layers)
        )
    )
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = derived(lambda config: ())
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    num_experts: int = 60
    num_experts_per_tok: int = 4
    qkv_bias: bool = True
    tie_word_embeddings: bool = False

    def problems(self) -> list[str]:
        """Experts and layers must agree with each other."""
        return [
            *enough_experts(self.num_experts_per_tok, self.num_experts),
            *one_type_a_layer(self.layer_types, self.num_hidden_layers),
        ]


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Config):
    """`configuration_qwen3_moe.py`; no expert is shared."""

    model_type = "qwen3_moe"
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    may_be_zero = frozenset({"num_experts"})
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = derived(split_evenly)
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = derived(lambda config: ())
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    tie_word_embeddings: bool = False

    def problems(self) -> list[str]:
        """A token cannot choose more experts than there are."""
        return enough_experts(self.num_experts_per_tok, self.num_experts)


def enough_experts(chosen: int, experts: int) -> list[str]:
    """No more experts are chosen for a token than a layer has; 0 experts mean a dense model."""
    if experts and chosen > experts:
        return [f"num_experts_per_tok is {chosen}, but a layer has {experts} experts"]
    return []


def mixtral(family: Family, config: MixtralConfig) -> Anatomy:
    """Layers of `modeling_mixtral.py`."""
    mlp = _experts(config.hidden_size, config.intermediate_size, config.num_local_experts, config.num_experts_per_tok)
    return llama_line(family, config, mlps=[mlp] * config.num_hidden_layers)


def qwen2_moe(family: Family, config: Qwen2MoeConfig) -> Anatomy:
    """Layers of `modeling_qwen2_moe.py`."""
    hidden, inner = config.hidden_size, config.shared_expert_intermediate_size
    shared = (
        *gated_mlp("mlp.shared_expert", hidden, inner),
        linear("mlp.shared_expert_gate", "router", hidden, 1),
    )
    return llama_line(
        family, config, mlps=[_sparse_or_dense(config, layer, shared) for layer in range(config.num_hidden_layers)]
    )


def qwen3_moe(family: Family, config: Qwen3MoeConfig) -> Anatomy:
    """Layers of `modeling_qwen3_moe.py`."""
    return llama_line(
        family, config, mlps=[_sparse_or_dense(config, layer, ()) for layer in range(config.num_hidden_layers)]
    )


def _sparse_or_dense(
    config: Qwen2MoeConfig | Qwen3MoeConfig, layer: int, shared: tuple[Operation, ...]
) -> tuple[Operation, ...]:
    hidden = config.hidden_size
    if layer in config.mlp_only_layers or not config.num_experts or (layer + 1) % config.decoder_sparse_step:
        return gated_mlp("mlp", hidden, config.intermediate_size)
    return (
        *shared,
        *_experts(hidden, config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok),
    )


def _experts(hidden: int, inner: int, experts: int, chosen: int) -> tuple[Operation, ...]:
    def stacked(name: str, columns: int, rows: int, reads: str, writes: str) -> ModuleWeight:
        return ModuleWeight(
            f"mlp.experts.{name}",
            "experts",
            "experts",
            rows,
            columns,
            copies=experts,
            active=chosen,
            reads=reads,
            writes=(writes,),
        )

    return (
        linear("mlp.gate", "router", hidden, experts, kind="router"),
        stacked("gate_up_proj", hidden, 2 * inner, "normed", "inner"),
        stacked("down_proj", inner, hidden, "inner", "tokens"),
    )


MIXTRAL = Family(
    config=MixtralConfig,
    build=mixtral,
    weighs_experts_in_fp32=True,
    old_expert_names={"gate": "gate", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
)
QWEN2_MOE = Family(config=Qwen2MoeConfig, build=qwen2_moe, qkv_bias="qkv_bias")
QWEN3_MOE = Family(
    config=Qwen3MoeConfig,
    build=qwen3_moe,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    head_norms=HeadNorms(),
    old_expert_names={
        "gate": "gate",
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
        "down_proj": "down_proj",
    },
)

RECORDS: Final = by_name(MIXTRAL, QWEN2_MOE, QWEN3_MOE)

"""What a family of models is: one record each, which the anatomy, memory, time, plan and the workers read.

A record says what all models of a family have in common and their config.json does not say: in which order a layer
normalises, how it turns queries and keys, what transformers' code for it needs besides. Sizes, windows and biases that
a model's own config tells stand in its `Anatomy`. The defaults are those of Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trainwright.anatomy.config import Config

if TYPE_CHECKING:
    from trainwright.anatomy.parts import Anatomy

NormKind = Literal["rms", "rms_scaled_in_fp32", "rms_of_one_more", "layer"]
"""`rms` scales in the dtype of its input, the next two in fp32: OLMo's, and Gemma's by one more than its weight."""

Positions = Literal["rotary", "table", "table_behind_masks", "table_for_each_sample", "slopes", "buckets", "image"]
"""How a token knows its place: by turning queries and keys, by a table of vectors that is looked up once for all
samples (before or behind the masks) or for each, by slopes added to the scores (ALiBi), by learned numbers added to
them (T5), by a vector for each patch."""

Rotation = Literal["halves", "halves_and_rest", "halves_in_fp32", "pairs_and_rest", "pairs_in_fp32"]
"""How queries and keys are turned: both halves of a head against each other, or each pair of neighbours.

`and_rest`: what is not turned is cut off first and joined again. `in_fp32`: tables stay fp32, the result is cast back.
"""

Embedding = Literal["plain", "scaled", "scaled_behind", "normed"]
"""What is done to word embeddings before the first layer: scaled by their module, or by the model behind it."""

Activation = Literal["one_kernel", "new_gelu", "bloom_gelu"]
"""`NewGELUActivation` and BLOOM's are written out in Python, operator by operator."""

LayerKind = Literal[
    "LlamaDecoderLayer",
    "GPT2Block",
    "Starcoder2DecoderLayer",
    "PhiDecoderLayer",
    "GPTNeoXLayer",
    "OPTDecoderLayer",
    "BloomBlock",
    "MptBlock",
    "T5Block",
    "BertLayer",
    "ViTLayer",
]
"""The class of transformers whose `forward` the layers of a family take; what a record says besides, they do too."""


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of a layer's norms by where they stand; None: there is none."""

    before_attention: str | None = "input_layernorm"
    behind_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    behind_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of queries and keys: of each head, or of all heads together; before they are turned, or behind."""

    query: str = "q_norm"
    key: str = "k_norm"
    of_all_heads: bool = False
    behind_rotation: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One family as transformers builds and runs it; compared by identity, as there is one record of each."""

    config: type[Config]
    """The fields of its config.json."""
    build: Callable[[Family, Any], Anatomy]
    """Make the anatomy from the record and a config."""
    transformers: str = "5.23"
    """The version that this describes."""
    layer: LayerKind = "LlamaDecoderLayer"

    norm: NormKind = "rms"
    norms: LayerNorms = LayerNorms()
    head_norms: HeadNorms | None = None
    norms_registered_first: bool = False
    """A layer registers its modules in the order of the pass, a norm before what it is for."""

    positions: Positions = "rotary"
    rotation: Rotation = "halves"
    rotary_share: float = 1.0
    """Share of a head that is turned where it is."""
    tables_of_each_layer_type: bool = False
    """Layers with a window and those without have rotary tables of their own."""
    scaled_queries: bool = False
    """Queries are multiplied by a number of each position."""
    attention_is_eager: bool = False
    """transformers has no fused attention for it: Gemma-2's scores are capped, others' have a bias."""
    softcapped: bool = False
    """Scores and logits go through a tanh."""
    makes_both_masks: bool = False
    """The mask of all pairs and that of a window are made, whichever the layers need."""
    mask_of_bools: bool = False
    """Its own attention wants a mask of bools also where it is eager."""
    does_without_padding_mask: bool = True
    """Padding on the right needs no mask: the forward pass does without one, and tokens look back only.

    OPT counts its positions from the mask, and those of tokens before the padding are the same; routers of experts read
    it only for a loss that the workers do not ask for. BLOOM and MPT make a mask of their own in any case.
    """
    joined_projections: bool = False
    """Queries, keys and values are one matrix."""
    joined_mlp: bool = False
    """Gate and up are one matrix."""
    qkv_bias: bool | str = False
    """Whether queries, keys and values have a bias, or the field of the config that says so."""
    output_bias: bool | str = False
    mlp_bias: bool | str = False

    activation: Activation = "one_kernel"
    weighs_experts_in_fp32: bool = False
    """The router's weights are not cast back to the dtype of the logits."""
    old_expert_names: Mapping[str, str] = field(default_factory=dict)
    """Names of routers and experts in checkpoints before transformers 5, which peft still takes, and what they are."""

    embedding: Embedding = "plain"
    scaled_residuals: bool = False
    """What attention and MLP add to the stream is multiplied by a number."""
    scaled_logits: bool = False
    drops_attention: bool = False
    """The weights of attention pass a dropout where what the layers add does."""
    drops_before_norms: bool = False
    """Dropouts lie between a layer's products and its norms, whatever the config says."""
    kept_in_fp32: tuple[str, ...] = ()
    """Endings of module paths that loading leaves in fp32 (`_keep_in_fp32_modules`)."""
    further_names: Mapping[str, str] = field(default_factory=dict)
    """Further names under which transformers lists shared tensors, and the names that own them."""
    position_mask_buffer: bool = False
    """Its model keeps a causal mask of the longest input."""

    @property
    def name(self) -> str:
        """The `model_type` of its config.json."""
        return self.config.model_type

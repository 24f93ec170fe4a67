"""Encoders: BERT with its masked language model head, ViT with its image classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from trainwright.anatomy.config import Config, derived, multiple_of_heads
from trainwright.anatomy.families.blocks import by_name, plain_mlp, split_attention, stack
from trainwright.anatomy.family import Family, LayerNorms
from trainwright.anatomy.parts import (
    Anatomy,
    Attention,
    ModuleWeight,
    Operation,
    Segment,
    embedding,
    linear,
    norm,
    parameter,
)


@dataclass(frozen=True, kw_only=True)
class BertConfig(Config):
    """`configuration_bert.py`."""

    model_type = "bert"
    refused: ClassVar[Mapping[str, Any]] = {"is_decoder": False, "add_cross_attention": False}
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    tie_word_embeddings: bool = True

    def problems(self) -> list[str]:
        """Hidden size and heads must agree."""
        return multiple_of_heads(self.hidden_size, self.num_attention_heads)


@dataclass(frozen=True, kw_only=True)
class VitConfig(Config):
    """`configuration_vit.py`; `num_labels` is the number of entries of `id2label`."""

    model_type = "vit"
    may_be_zero = frozenset({"num_labels"})
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_dropout_prob: float = 0.0
    image_size: int | tuple[int, ...] = 224
    patch_size: int | tuple[int, ...] = 16
    num_channels: int = 3
    qkv_bias: bool = True
    id2label: Mapping[Any, Any] | None = None
    num_labels: int = derived(lambda config: 2 if config.id2label is None else len(config.id2label))

    @property
    def patches(self) -> int:
        """Patches of one image."""
        (height, width), (patch_height, patch_width) = pair(self.image_size), pair(self.patch_size)
        return (height // patch_height) * (width // patch_width)

    def problems(self) -> list[str]:
        """Hidden size and heads must agree."""
        return multiple_of_heads(self.hidden_size, self.num_attention_heads)


def pair(size: int | tuple[int, ...]) -> tuple[int, int]:
    """Height and width; one number means a square."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def bert(family: Family, config: BertConfig) -> Anatomy:
    """`BertForMaskedLM` of `modeling_bert.py`, which has no pooler."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    words = "bert.embeddings.word_embeddings"
    block: tuple[Operation, ...] = (
        *split_attention(
            "attention",
            hidden,
            Attention(heads, heads, hidden // heads, causal=False),
            names=("self.query", "self.key", "self.value", "output.dense"),
            qkv_bias=True,
            out_bias=True,
            reads="tokens",
        ),
        norm("attention.output.LayerNorm", hidden, bias=True, writes="tokens"),
        *plain_mlp("intermediate.dense", "output.dense", hidden, config.intermediate_size, reads="tokens"),
        norm("output.LayerNorm", hidden, bias=True, writes="tokens"),
    )
    before: tuple[Operation, ...] = (
        embedding(words, config.vocab_size, hidden, begins=True),
        embedding("bert.embeddings.position_embeddings", config.max_position_embeddings, hidden),
        embedding("bert.embeddings.token_type_embeddings", config.type_vocab_size, hidden),
        norm("bert.embeddings.LayerNorm", hidden, bias=True, writes="tokens"),
    )
    head: tuple[Operation, ...] = (
        linear("cls.predictions.transform.dense", "head", hidden, hidden, bias=True, reads="tokens", writes="inner"),
        norm("cls.predictions.transform.LayerNorm", hidden, bias=True, reads="inner", writes="normed"),
        parameter("cls.predictions.bias", "bias", config.vocab_size, writes="logits"),
        linear(
            "cls.predictions.decoder",
            "head",
            hidden,
            config.vocab_size,
            writes="logits",
            tied_to=words if config.tie_word_embeddings else None,
        ),
    )
    layers = stack("bert.encoder.layer", [block] * config.num_hidden_layers)
    return Anatomy(family, (Segment("", before), *layers, Segment("", head)), output="cls.predictions.decoder")


def vit(family: Family, config: VitConfig) -> Anatomy:
    """`ViTForImageClassification` of `modeling_vit.py`."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    block = (
        norm("layernorm_before", hidden, bias=True),
        *split_attention(
            "attention",
            hidden,
            Attention(heads, heads, hidden // heads, causal=False),
            qkv_bias=config.qkv_bias,
            out_bias=True,
        ),
        norm("layernorm_after", hidden, bias=True),
        *plain_mlp("mlp.fc1", "mlp.fc2", hidden, config.intermediate_size),
    )
    before: tuple[Operation, ...] = (
        parameter("vit.embeddings.cls_token", "embedding", 1, 1, hidden),
        parameter("vit.embeddings.position_embeddings", "embedding", 1, config.patches + 1, hidden),
        patch_projection(
            "vit.embeddings.patch_embeddings.projection", hidden, config.num_channels, pair(config.patch_size)
        ),
    )
    after: tuple[Operation, ...] = (norm("vit.layernorm", hidden, bias=True),)
    if config.num_labels:
        after += (linear("classifier", "head", hidden, config.num_labels, bias=True, writes="logits", over="samples"),)
    layers = stack("vit.layers", [block] * config.num_hidden_layers, dropout=config.hidden_dropout_prob)
    return Anatomy(
        family, (Segment("", before), *layers, Segment("", after)), output=None, image_tokens=config.patches + 1
    )


def patch_projection(name: str, hidden: int, channels: int, patch: tuple[int, int]) -> ModuleWeight:
    """The convolution that makes one token of each patch."""
    return ModuleWeight(
        name,
        "embedding",
        "patches",
        hidden,
        channels * patch[0] * patch[1],
        bias=True,
        over="patches",
        reads="image",
        shape=(hidden, channels, *patch),
    )


BERT = Family(
    config=BertConfig,
    build=bert,
    layer="BertLayer",
    norm="layer",
    norms=LayerNorms(None, "attention.output.LayerNorm", None, "output.LayerNorm"),
    positions="table",
    does_without_padding_mask=False,
    embedding="normed",
    drops_before_norms=True,
    further_names={"cls.predictions.decoder.bias": "cls.predictions.bias"},
)
VIT = Family(
    config=VitConfig,
    build=vit,
    layer="ViTLayer",
    norm="layer",
    norms=LayerNorms("layernorm_before", None, "layernorm_after", None),
    positions="image",
    does_without_padding_mask=False,
)

RECORDS: Final = by_name(BERT, VIT)

"""Gemma 3 with eyes (4B and up): a SigLIP tower and a projector beside the language model.

`AutoModelForCausalLM` builds all three. Text never passes the tower, but its weights are in memory, and peft's
`all-linear` adapts them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainwright.anatomy.config import Config, multiple_of_heads, read_fields
from trainwright.anatomy.families.blocks import by_name, plain_mlp, split_attention, stack
from trainwright.anatomy.families.encoders import pair, patch_projection
from trainwright.anatomy.families.llama import GEMMA3_TEXT, Gemma3TextConfig
from trainwright.anatomy.families.llama_line import llama_line
from trainwright.anatomy.family import Family
from trainwright.anatomy.parts import Anatomy, Attention, ModuleWeight, Operation, Segment, embedding, norm, parameter


@dataclass(frozen=True, kw_only=True)
class SiglipVisionConfig(Config):
    """`SiglipVisionConfig` of `configuration_siglip.py`; the attention-pooling head is not described."""

    model_type = "siglip_vision_model"
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int | tuple[int, ...] = 224
    patch_size: int | tuple[int, ...] = 16
    vision_use_head: bool = True

    def problems(self) -> list[str]:
        """Hidden size and heads must agree; no pooling head."""
        pooled = ["vision_use_head must be false, as it is in every released Gemma 3"] if self.vision_use_head else []
        return [*pooled, *multiple_of_heads(self.hidden_size, self.num_attention_heads)]


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Config):
    """`Gemma3Config` of `configuration_gemma3.py`."""

    model_type = "gemma3"
    text_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    vision_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tie_word_embeddings: bool = True

    @property
    def text(self) -> Gemma3TextConfig:
        """The language model, which is tied as the whole says."""
        return read_fields(Gemma3TextConfig, {**self.text_config, "tie_word_embeddings": self.tie_word_embeddings})

    @property
    def vision(self) -> SiglipVisionConfig:
        """The tower."""
        return read_fields(SiglipVisionConfig, self.vision_config)


def gemma3(family: Family, config: Gemma3Config) -> Anatomy:
    """`Gemma3ForConditionalGeneration` of `modeling_gemma3.py`."""
    text, vision = config.text, config.vision
    language = llama_line(family, text, path="model.language_model")
    before = Segment(
        "",
        tuple(
            _aside(operation)
            for operation in (
                patch_projection(
                    "model.vision_tower.embeddings.patch_embedding",
                    vision.hidden_size,
                    vision.num_channels,
                    pair(vision.patch_size),
                ),
                embedding("model.vision_tower.embeddings.position_embedding", _patches(vision), vision.hidden_size),
            )
        ),
    )
    after = Segment(
        "",
        tuple(
            _aside(operation)
            for operation in (
                norm("model.vision_tower.post_layernorm", vision.hidden_size, bias=True),
                parameter(
                    "model.multi_modal_projector.mm_input_projection_weight",
                    "vision",
                    vision.hidden_size,
                    text.hidden_size,
                ),
                norm("model.multi_modal_projector.mm_soft_emb_norm", vision.hidden_size),
            )
        ),
    )
    block = tuple(_aside(operation) for operation in _tower_block(vision) if isinstance(operation, ModuleWeight))
    tower = stack("model.vision_tower.encoder.layers", [block] * vision.num_hidden_layers)
    return dataclasses.replace(language, segments=(before, *tower, after, *language.segments))


def _patches(vision: SiglipVisionConfig) -> int:
    (height, width), (patch_height, patch_width) = pair(vision.image_size), pair(vision.patch_size)
    return (height // patch_height) * (width // patch_width)


def _tower_block(vision: SiglipVisionConfig) -> tuple[Operation, ...]:
    hidden, heads = vision.hidden_size, vision.num_attention_heads
    return (
        norm("layer_norm1", hidden, bias=True),
        *split_attention(
            "self_attn",
            hidden,
            Attention(heads, heads, hidden // heads, causal=False),
            names=("q_proj", "k_proj", "v_proj", "out_proj"),
            qkv_bias=True,
            out_bias=True,
        ),
        norm("layer_norm2", hidden, bias=True),
        *plain_mlp("mlp.fc1", "mlp.fc2", hidden, vision.intermediate_size),
    )


def _aside(weight: ModuleWeight) -> ModuleWeight:
    """The same weight, never passed by text."""
    return dataclasses.replace(weight, part="vision", over="nothing", reads="image", writes=("image",), begins=False)


GEMMA3 = dataclasses.replace(GEMMA3_TEXT, config=Gemma3Config, build=gemma3)

RECORDS: Final = by_name(GEMMA3)

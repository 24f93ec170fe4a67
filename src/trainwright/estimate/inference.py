"""Memory to answer with a model: its weights, the keys and values of what was read, and a pass over them."""

from __future__ import annotations

from typing import Final

from trainwright.anatomy.parts import Anatomy, Attention
from trainwright.anatomy.quantized import nf4_bytes, quantized_matrices

ELEMENT_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}


def weight_bytes(anatomy: Anatomy, dtype: str, *, four_bits: bool = False) -> int:
    """Bytes of the weights in `dtype`; with `four_bits` the matrices that bitsandbytes packs are nf4."""
    element = ELEMENT_BYTES[dtype]
    total = anatomy.parameter_count * element
    if four_bits:
        total += sum(nf4_bytes(count) - count * element for count in quantized_matrices(anatomy).values())
    return total


def cache_bytes(anatomy: Anatomy, dtype: str, samples: int, length: int) -> int:
    """Bytes of the keys and values of `samples` sequences of `length` tokens, over all layers.

    Layers that see a window are counted in full: transformers' default cache keeps what lies behind the window.
    """
    element = ELEMENT_BYTES[dtype]
    per_token = sum(
        2 * operation.key_value_heads * operation.head_dim * element
        for segment in anatomy.segments
        for operation in segment.operations
        if isinstance(operation, Attention)
    )
    return per_token * samples * length


def pass_bytes(anatomy: Anatomy, dtype: str, samples: int, length: int) -> int:
    """Bytes alive at the widest point of a forward pass without gradients, and the logits of each last token.

    The widest point is a matrix with its input and result beside the residual stream; generation asks for the logits
    of the last position alone (`logits_to_keep` in `transformers/generation/utils.py`), and makes them fp32.
    """
    element = ELEMENT_BYTES[dtype]
    matrices = [weight for path, weight in anatomy.weights() if weight.is_matmul and path != anatomy.output]
    widest = max((weight.columns + 2 * weight.rows * weight.active for weight in matrices), default=0)
    vocabulary = max(
        (weight.rows for _, weight in anatomy.weights() if weight.part in ("head", "embedding")), default=0
    )
    return samples * length * widest * element + samples * vocabulary * (element + 4)

"""Bytes of a model whose matrices are loaded in 4 bits (nf4 with double quantisation), as bitsandbytes stores them.

Blocks of 64 weights share a scale of one byte; 256 scales share a scale in fp32; one fp32 offset and two code tables
stand beside (`bitsandbytes/functional.py`, `quantize_4bit` with `compress_statistics`).
"""

from __future__ import annotations

from math import prod
from typing import Final

from trainwright.anatomy.parts import Anatomy

BLOCK: Final = 64
SCALES_BLOCK: Final = 256
OFFSET_BYTES: Final = 4
NF4_TABLE_BYTES: Final = 16 * 4
SCALE_TABLE_BYTES: Final = 256 * 4


def nf4_bytes(weights: int) -> int:
    """Bytes of one matrix of `weights` numbers."""
    packed = -(-weights // 2)
    scales = -(-weights // BLOCK)
    scale_scales = -(-scales // SCALES_BLOCK) * 4
    return packed + scales + scale_scales + OFFSET_BYTES + NF4_TABLE_BYTES + SCALE_TABLE_BYTES


def quantized_matrices(anatomy: Anatomy) -> dict[str, int]:
    """Number of weights of each matrix that is loaded in 4 bits, by its path.

    Linears are, but for the output embedding, shared weights and what transformers keeps in fp32; stacked experts,
    routers, embeddings and norms are not (`transformers/integrations/bitsandbytes.py`, `replace_with_bnb_linear`).
    Not described: transformers also leaves out the module of the last parameter, where no norm stands at the end.
    """
    return {
        path: prod(weight.weight_shape())
        for path, weight in anatomy.weights()
        if weight.kind in ("linear", "conv1d")
        and path != anatomy.output
        and weight.tied_to is None
        and not path.endswith(anatomy.family.kept_in_fp32 or ("\0",))
    }

"""Products of stacked experts in fp32 and fp16: torch's meta kernel takes bf16 alone, its CUDA kernel takes all three.

aten/src/ATen/native/cuda/GroupedBlas.cpp of torch 2.13 (`_grouped_mm_cuda`): what the grouped kernel cannot do is done
expert by expert (`_grouped_mm_fallback`, aten/src/ATen/native/GroupedMMUtils.h), each product into its rows of the
result. Neither way takes anything else from the allocator that depends on the dtype.
"""

from __future__ import annotations

import torch

ALIGNMENT_BYTES = 16
"""Rows of a result begin at multiples (`create_grouped_gemm_output_tensor`)."""


def register(library: torch.library.Library) -> None:
    """Replace the meta kernel, for fake tensors and those on the meta device."""
    library.impl("_grouped_mm", _grouped_mm, "Meta")


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    torch._check(mat_a.dtype == mat_b.dtype, lambda: f"expected one dtype, got {mat_a.dtype} and {mat_b.dtype}")
    size = _size(mat_a, mat_b, 0 if offs is None else offs.shape[0])
    dtype = out_dtype or mat_a.dtype
    step = ALIGNMENT_BYTES // dtype.itemsize
    row = -(-size[-1] // step) * step
    strides = (size[-2] * row, row, 1)[-len(size) :]
    return torch.empty_strided(size, strides, dtype=dtype, device=mat_a.device)


def _size(mat_a: torch.Tensor, mat_b: torch.Tensor, groups: int) -> tuple[int, ...]:
    """Groups are stretches of the rows of `a`, of the columns of `b`, or (both flat) of what is summed over."""
    if mat_a.dim() == 2 and mat_b.dim() == 2:
        return groups, mat_a.shape[0], mat_b.shape[1]
    if mat_a.dim() == 2:
        return mat_a.shape[0], mat_b.shape[-1]
    if mat_b.dim() == 2:
        return mat_a.shape[1], mat_b.shape[1]
    return mat_a.shape[0], mat_a.shape[1], mat_b.shape[-1]

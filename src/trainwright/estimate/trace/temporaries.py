"""Memory that CUDA kernels and libraries take from the caching allocator for themselves, which no trace can see.

Shapes: B batch, H query heads, K key heads, S queries, T keys, D head size, N indices, E embedding size.
All sizes are in bytes; every entry names the source it was read from (torch 2.13 unless said otherwise).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from trainwright.estimate.reductions import row_sum_bytes

MATRIX_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "mv", "addmv")
)

LAST_OUTPUT_FIRST = frozenset({"aten::native_dropout"})
"""Operators that make their outputs in the other order: the mask first (native/cuda/Dropout.cu, `dropout_cuda`)."""


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Return what each cuBLAS handle keeps for each stream it was used on.

    aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`: `:4096:2:16:8` KiB, and 32 MiB on Hopper.
    The forward pass and the backward pass run in threads of their own, each with a handle.
    """
    return 32 << 20 if compute_capability[0] == 9 else (2 * 4096 + 8 * 16) << 10


def of_operator(name: str, args: Sequence[Any], compute_capability: tuple[int, int]) -> list[int]:
    """Return the sizes of what one call of an operator holds besides its outputs, at its highest."""
    if name == "aten::sum":
        return _row_sum(args, compute_capability)
    rule = _RULES.get(name)
    return rule(args) if rule is not None else []


def _row_sum(args: Sequence[Any], compute_capability: tuple[int, int]) -> list[int]:
    """The sum over the leading dimensions of a contiguous tensor, as for the gradients of biases and norms."""
    tensor, dimensions = args[0], args[1] if len(args) > 1 else None
    if not dimensions or tensor.dim() == 0 or not tensor.is_contiguous():
        return []
    summed = sorted(d % tensor.dim() for d in dimensions)
    rest = tensor.shape[len(summed) :]
    if summed != list(range(len(summed))) or not rest or not tensor.numel():
        return []
    columns = math.prod(rest)
    size = row_sum_bytes(tensor.numel() // columns, columns, compute_capability)
    return [size] if size else []


def _safe_softmax(args: Sequence[Any]) -> list[int]:
    """aten/src/ATen/native/transformers/attention.cpp: a bool for each score, to find rows of nothing but -inf."""
    return [args[0].numel()]


def _softmax_backward(args: Sequence[Any]) -> list[int]:
    """aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out`: the gradient times the result."""
    return [args[0].element_size() * args[0].numel()]


def _flash_backward_heads_first(args: Sequence[Any]) -> list[int]:
    batch, heads, queries, head = args[1].shape
    return _flash_backward(batch, heads, args[2].shape[1], queries, args[2].shape[2], head, args[1].element_size())


def _flash_backward_heads_last(args: Sequence[Any]) -> list[int]:
    if args[1].dim() != 4:
        return []
    batch, queries, heads, head = args[1].shape
    return _flash_backward(batch, heads, args[2].shape[2], queries, args[2].shape[1], head, args[1].element_size())


def _flash_backward(b: int, h: int, k: int, s: int, t: int, d: int, element: int) -> list[int]:
    """aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`.

    `softmax_d` (B, H, S to 128) fp32; `dq_accum` (B, S to 128, H, D to 32 or 64) fp32; with fewer key heads than
    query heads also `dk_expanded`, `dv_expanded` (B, T, H, D). The flash-attn package allocates the same.
    """
    rows, columns = _up(s, 128), _up(d, 32 if d <= 128 else 64)
    sizes = [4 * b * h * rows, 4 * b * rows * h * columns]
    return sizes + [element * b * t * h * d] * 2 if k != h else sizes


def _efficient_backward(args: Sequence[Any]) -> list[int]:
    """aten/src/ATen/native/transformers/cuda/attention_backward.cu, `_efficient_attention_backward`.

    `delta` (B, H, S) fp32, and for half precision the workspace in which dQ is summed in fp32:
    include/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h, `workspace_elements_gq`, blocks of
    64 x 64 queries x keys up to head size 64 and 128 x 128 up to 128 (kernels/cutlassB.h, sm80). Beyond 128 dK and
    dV are summed in it too, with blocks of 128 x 64.
    """
    q, t = args[1], args[2].shape[2]
    b, h, s, d = q.shape
    delta = 4 * b * h * s
    if q.element_size() == 4:
        return [delta]
    rows, columns = (64, 64) if d <= 64 else (128, 128) if d <= 128 else (128, 64)
    blocks = -(-s // rows) * -(-d // columns)
    workspace = blocks * (4 * rows * columns + 16)
    if d > 128:
        splits = max(1, min(-(-t // columns), 200 // (b * h)))
        workspace += 2 * 4 * splits * columns * _up(d, rows)
    return [delta, b * h * workspace]


def _cudnn_backward(args: Sequence[Any]) -> list[int]:
    """One workspace: dQ (B, H, S, D) and row sums (B, H, S) in fp32, with fewer key heads dK, dV of each query head.

    cuDNN's own, aligned; so in the allocator's history of cuDNN 9.19 on an H200, to the byte, for six shapes.
    """
    b, h, s, d = args[1].shape
    k, t = args[2].shape[1:3]
    expanded = 2 * args[1].element_size() * b * h * t * d if k != h else 0
    return [4 * b * h * s * d + 4 * b * h * s + expanded + 256]


def _embedding_backward(args: Sequence[Any]) -> list[int]:
    """aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu.

    Above 3072 indices they are sorted: six arrays of N indices and `grad_weight_per_segment` (N, E) fp32.
    """
    gradient, indices = args[0], args[1]
    n = indices.numel()
    if n <= 3072:
        return []
    return [indices.element_size() * n] * 6 + [4 * n * gradient.shape[-1]]


def _index_put(args: Sequence[Any]) -> list[int]:
    """aten/src/ATen/native/cuda/Indexing.cu, `index_put_with_sort_kernel`, with accumulate=True.

    The linear index, its sorted copy, the original places, and the places sorted: four arrays of N indices.
    """
    if len(args) < 4 or not args[3]:
        return []
    n = max((index.numel() for index in args[1] if index is not None), default=0)
    return [8 * n] * 4


_RULES: dict[str, Callable[[Sequence[Any]], list[int]]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward_heads_first,
    "aten::_flash_attention_backward": _flash_backward_heads_last,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_index_put_impl_": _index_put,
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put,
}


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

"""Which attention kernel CUDA would take, and what kernels hold for themselves, against cases worked by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trainwright.estimate.trace import kernels, temporaries

A100, V100, H200 = (8, 0), (7, 0), (9, 0)
FLASH_BACKWARD = "aten::_scaled_dot_product_flash_attention_backward"
EFFICIENT_BACKWARD = "aten::_scaled_dot_product_efficient_attention_backward"


@pytest.fixture(autouse=True)
def _restore_device() -> Iterator[None]:
    before = (kernels.DEVICE.compute_capability, kernels.DEVICE.attention)
    yield
    kernels.DEVICE.compute_capability, kernels.DEVICE.attention = before


def heads(count: int, size: int = 64, length: int = 32, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(2, count, length, size, dtype=dtype)


@pytest.mark.parametrize(
    ("capability", "dtype", "key_heads", "head_size", "masked", "kernel"),
    [
        (A100, torch.bfloat16, 4, 64, False, "flash"),
        (A100, torch.bfloat16, 2, 64, False, "flash"),  # grouped heads in the kernel
        (A100, torch.bfloat16, 4, 64, True, "efficient"),  # flash takes no mask
        (A100, torch.bfloat16, 2, 64, True, "math"),  # and the efficient kernel no grouped heads
        (A100, torch.bfloat16, 4, 512, False, "efficient"),
        (A100, torch.float32, 4, 64, False, "efficient"),
        (A100, torch.bfloat16, 4, 36, True, "math"),  # rows of 72 bytes are not aligned
        (H200, torch.bfloat16, 4, 64, False, "cudnn"),  # this and the next as torch 2.11 answered on an H200
        (H200, torch.bfloat16, 2, 256, True, "cudnn"),
        (H200, torch.bfloat16, 4, 36, False, "flash"),
        (H200, torch.bfloat16, 4, 512, False, "efficient"),
        (H200, torch.float32, 2, 64, False, "math"),
        (V100, torch.float16, 4, 64, False, "efficient"),
        (V100, torch.bfloat16, 4, 64, False, "math"),  # no bf16 on Volta
    ],
)
def test_attention_kernel(
    capability: tuple[int, int], dtype: torch.dtype, key_heads: int, head_size: int, masked: bool, kernel: str
) -> None:
    kernels.DEVICE.compute_capability = capability
    q, k = heads(4, head_size, dtype=dtype), heads(key_heads, head_size, dtype=dtype)
    mask = torch.ones(2, 1, 32, 32, dtype=torch.bool) if masked else None
    assert kernels.attention_kernel(q, k, k, mask, not masked, key_heads != 4) == kernel


@pytest.mark.parametrize(("learned", "laid_out", "kernel"), [(True, True, "efficient"), (False, False, "math")])
def test_a_bias_that_is_learned_or_laid_out_otherwise_on_an_h200(learned: bool, laid_out: bool, kernel: str) -> None:
    """T5's bias is a table looked up: (queries, keys, heads), seen as (heads, queries, keys)."""
    kernels.DEVICE.compute_capability = H200
    bias = torch.zeros(32, 32, 4).permute(2, 0, 1).unsqueeze(0)
    bias = (bias.contiguous() if laid_out else bias).requires_grad_(learned)
    assert kernels.attention_kernel(heads(4), heads(4), heads(4), bias, False, False) == kernel


def test_cudnn_backward_has_one_workspace() -> None:
    """2 x 32 heads, 8 of keys, 4096 tokens, heads of 128: 257 MiB in the allocator's history of an H200."""
    q, k = (torch.empty(2, count, 4096, 128, dtype=torch.bfloat16, device="meta") for count in (32, 8))
    name = "aten::_scaled_dot_product_cudnn_attention_backward"
    assert temporaries.of_operator(name, (q, q, k, k), H200) == [(257 << 20) + 256]


@pytest.mark.parametrize(("shape", "mib"), [((4, 2048, 896), 56), ((4, 2048, 128), 8), ((1, 8, 896), 0)])
def test_sums_over_many_rows_leave_parts_in_memory(shape: tuple[int, ...], mib: int) -> None:
    """As the allocator's history of an H200 has them for the gradients of a norm and of a bias."""
    gradient = torch.empty(shape, device="meta")
    found = temporaries.of_operator("aten::sum", (gradient, [0, 1], True), H200)
    assert found == ([mib << 20] if mib else [])


def test_a_kernel_can_be_insisted_on() -> None:
    kernels.DEVICE.compute_capability, kernels.DEVICE.attention = A100, "efficient"
    assert kernels.attention_kernel(heads(4), heads(4), heads(4), None, True, False) == "efficient"


def test_flash_backward_sums_in_fp32_and_expands_grouped_heads() -> None:
    gradient, q, k = heads(4, 80, 100), heads(4, 80, 100), heads(4, 80, 100)
    row_sums, query_sums = 2 * 4 * 128 * 4, 2 * 128 * 4 * 96 * 4  # 100 rows to 128, 80 columns to 96, fp32
    assert temporaries.of_operator(FLASH_BACKWARD, (gradient, q, k, k), A100) == [row_sums, query_sums]
    grouped = heads(1, 80, 100)
    expanded = 2 * 100 * 4 * 80 * 2
    assert temporaries.of_operator(FLASH_BACKWARD, (gradient, q, grouped, grouped), A100) == [
        row_sums,
        query_sums,
        expanded,
        expanded,
    ]


def test_efficient_backward_needs_a_workspace_in_half_precision_only() -> None:
    q = heads(4, 64, 100)
    row_sums = 2 * 4 * 100 * 4
    blocks = 2 * 1  # 100 queries and 64 columns in tiles of 64 x 64
    assert temporaries.of_operator(EFFICIENT_BACKWARD, (q, q, q, q), A100) == [
        row_sums,
        2 * 4 * blocks * (64 * 64 * 4 + 16),
    ]
    full = q.float()
    assert temporaries.of_operator(EFFICIENT_BACKWARD, (full, full, full, full), A100) == [row_sums]


def test_embedding_backward_sorts_many_indices() -> None:
    gradient = torch.empty(4096, 64, dtype=torch.bfloat16)
    few, many = torch.zeros(3072, dtype=torch.int64), torch.zeros(4096, dtype=torch.int64)
    assert temporaries.of_operator("aten::embedding_dense_backward", (gradient, few), A100) == []
    held = temporaries.of_operator("aten::embedding_dense_backward", (gradient, many), A100)
    assert sum(held) == 6 * 4096 * 8 + 4096 * 64 * 4


def test_other_operators_hold_nothing() -> None:
    assert temporaries.of_operator("aten::mul", (heads(4), heads(4)), A100) == []


@pytest.mark.parametrize(("capability", "kib"), [((7, 0), 8320), (A100, 8320), ((8, 9), 8320), ((9, 0), 32768)])
def test_cublas_workspace(capability: tuple[int, int], kib: int) -> None:
    assert temporaries.cublas_workspace_bytes(capability) == kib * 1024

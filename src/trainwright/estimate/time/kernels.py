"""Seconds of single kernels on one GPU: matrix products, attention, and what streams through memory."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Final, Literal

from trainwright.estimate.time.rates import Arithmetic, Speed

FusedAttention = Literal["flash", "efficient", "cudnn"]

# A kernel begins when the one before it has ended, and its first bytes come late: kernels that do nothing follow each
# other every 3 microseconds (forums.developer.nvidia.com/t/233645).
_KERNEL_S: Final = 3e-6
# Tiles of cuBLAS with the efficiency of each beside the largest, which reuse operands best: NVIDIA, "Matrix
# Multiplication Background User's Guide", section 3.1 (tile efficiency) and figure 5.
_TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7))
# Products with few tiles split the sum over k between multiprocessors (split-K, stream-K), into parts of this length.
_SPLIT_K: Final = 1024
# Rows of queries in one block of FlashAttention-2; blocks on the diagonal of a causal mask are computed whole.
_FLASH_BLOCK: Final = 128
# The backward pass reaches its rate on long sequences only: 53, 63, 70, 75, 77 TFLOPS at 512, 1024, 2048, 4096, 8192
# tokens on RTX A5000 (github.com/gpu-mode/ring-attention issue 10) is 80 x length / (length + 270).
_FLASH_BACKWARD_HALF: Final = 270
_FLASH_FORWARD_HALF: Final = 40
# Kernels that keep no scores but are not FlashAttention-2, beside it: forward 43 of 53 TFLOPS and backward 27 of 52 on
# RTX 3090 (xformers in github.com/Dao-AILab/flash-attention issue 416, causal, heads of 64, 4096 tokens).
_EFFICIENT: Final = (43 / 53, 27 / 52)
_NARROW_HEAD: Final = 64
# Before Ampere there is no FlashAttention-2: half of the tensor rate forward, a third backward, as the first
# FlashAttention reached with 0.25 to 0.40 for both (arXiv 2307.08691, abstract).
_BEFORE_FLASH: Final = (0.40, 0.28)


def matmul_s(
    speed: Speed, arithmetic: Arithmetic, m: float, n: float, k: float, flops: float, *, together: int = 1
) -> float:
    """Seconds for `flops` operations in products of (m x k) and (k x n), of which one kernel does several `together`.

    The larger of arithmetic, at the achievable rate with whole tiles and whole waves of tiles, and memory traffic.
    """
    element = 4 if arithmetic in ("fp32", "tf32") else 2
    moved = element * (m * k + k * n + m * n) * flops / (2 * m * n * k)
    rate = speed.matmul[arithmetic].usual * _share_of_rate(
        m, n, k, speed.fill[arithmetic], together, speed.multiprocessors
    )
    return max(flops / rate, moved / speed.bandwidth.usual)


@lru_cache(maxsize=4096)
def _share_of_rate(m: float, n: float, k: float, fill: int, together: int, multiprocessors: int | None) -> float:
    """Share of the rate that is left by tiles that reach over the edge and by the last, partly filled wave."""
    if multiprocessors is None:
        return k / (k + fill)
    best = 0.0
    for rows, columns, efficiency in _TILES:
        across, down = ceil(m / rows), ceil(n / columns)
        covered = m * n / (across * rows * down * columns)
        tiles = across * down * together
        if tiles < multiprocessors:
            tiles *= max(1, min(multiprocessors // tiles, int(k) // _SPLIT_K))
        waves = tiles / multiprocessors
        best = max(best, efficiency * covered * waves / ceil(waves))
    return best * k / (k + fill)


def attention_s(
    speed: Speed,
    arithmetic: Arithmetic,
    flops: float,
    *,
    length: int,
    window: int | None,
    backward: bool,
    kernel: FusedAttention,
    causal: bool,
    head_dim: int,
) -> float:
    """Seconds for `flops` operations of fused attention; pairs that `causal` hides are not among them."""
    half = _FLASH_BACKWARD_HALF if backward else _FLASH_FORWARD_HALF
    best = speed.flash_backward if backward else speed.flash_forward
    if kernel == "cudnn" and speed.cudnn is not None:
        best = (speed.cudnn.narrow if head_dim <= _NARROW_HEAD else speed.cudnn.wide)[backward]
    if best is None:
        rate = _BEFORE_FLASH[backward] * speed.peak
    else:
        share = _EFFICIENT[backward] if kernel == "efficient" else 1.0
        rate = best.usual * speed.peak * length / (length + half) * share
    if arithmetic in ("fp32", "tf32"):
        rate *= speed.matmul[arithmetic].usual / speed.peak
    on_the_edge = 1 + _FLASH_BLOCK / min(length, window or length) if causal else 1.0
    return flops * on_the_edge / rate


def stream_s(speed: Speed, moved_bytes: float, kernels: float = 0.0) -> float:
    """Seconds of `kernels` kernels that do nothing but read and write `moved_bytes` of device memory together."""
    return moved_bytes / speed.bandwidth.usual + kernels * _KERNEL_S

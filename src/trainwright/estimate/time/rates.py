"""What a GPU really achieves, from its data sheet and from published microbenchmarks; never from a training run.

Each share of the data sheet's rate is a spread: the lowest, the median and the highest of independent measurements.
The estimate uses the median; the spread becomes the range of the step time.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from trainwright.hardware.catalog import Figure, GpuSpec

Arithmetic = Literal["bf16", "fp16", "tf32", "fp32"]


@dataclass(frozen=True, slots=True)
class RateRange:
    """The slowest, the usual and the fastest of a rate, in its own unit."""

    slow: float
    usual: float
    fast: float

    def __mul__(self, factor: float) -> RateRange:
        return RateRange(self.slow * factor, self.usual * factor, self.fast * factor)


@dataclass(frozen=True, slots=True)
class HeadRates:
    """Shares of the tensor rate that an attention reaches, by the width of a head: forward and backward."""

    narrow: tuple[RateRange, RateRange]
    """Heads of up to 64."""
    wide: tuple[RateRange, RateRange]


@dataclass(frozen=True, slots=True)
class Speed:
    """What one GPU achieves: products in operations a second, memory in bytes a second."""

    matmul: dict[Arithmetic, RateRange]
    bandwidth: RateRange
    flash_forward: RateRange | None
    """Of the tensor rate of the data sheet; None before Ampere, which FlashAttention-2 needs."""
    flash_backward: RateRange | None
    cudnn: HeadRates | None
    """cuDNN's attention, where torch prefers it."""
    capability: tuple[int, int] | None
    peak: float
    """16-bit operations a second of the data sheet."""
    multiprocessors: int | None
    fill: dict[Arithmetic, float]
    """What a tile multiplies before its pipeline is full, and the writing of its result, as a length of k."""


# Dense 16-bit products with random values, in TFLOPS. `best` is the best of several shapes or sizes (1024 to 10240),
# `large` one given product of 8192 or 10240 squared, where long work meets the power limit. Training is long work of
# shapes that nobody chose for their rate: `large` is its usual rate, `best` the upper end.
#   z: github.com/zzc0721/torch-performance-test-data, database.md and issues 78, 79, 114, 124, 131, 200
#   s: github.com/stas00/ml-engineering, "Maximum Achievable Matmul FLOPS comparison table"
#   l: github.com/mli/transformers-benchmarks, README (8192; torch of mid 2022) and issue 4
#   h: thonking.ai "Strangely, Matrix Multiplications on GPUs Run Faster When Given Predictable Data" (8192)
#   f: github.com/pranjalssh/fast.cu (cuBLAS, 8192: README, and issue 13 with CUDA 12.4)
_BEST: Final[dict[str, tuple[float, ...]]] = {
    "a100-40gb": (247.6, 246.3),  # z
    "a100-80gb": (271.2, 264.5, 258.7),  # s, z
    "a100-40gb-pcie": (252.9,),  # s
    "a100-80gb-pcie": (252.9,),  # s
    "a800-80gb": (266.5, 266.0),  # z
    "v100-16gb": (88.9 * 125 / 130,),  # z (V100S, whose data sheet says 130)
    "v100-32gb": (88.9 * 125 / 130,),
    "t4": (41.9, 42.7),  # z
    "h100": (794.5, 789.2, 761.8),  # s, z
    "h200": (790.3, 759.4),  # z
    "gh200": (828.6,),  # s
    "b200": (1745.0, 1696.0, 1627.6),  # s, z
    "l40s": (264.0, 269.2),  # z
    "a6000": (123.3, 120.5),  # z
    "rtx-pro-6000": (418.0, 409.4, 315.5, 312.8),  # z
    "rtx-3060-12gb": (25.5, 24.8),  # z
    "rtx-3080-10gb": (64.7, 64.1),  # z
    "rtx-3090": (76.3, 75.6, 76.7, 75.9),  # z
    "rtx-4060-ti-16gb": (42.7,),  # z
    "rtx-4090": (168.4, 164.8, 165.1, 173.3, 162.4, 167.1),  # z
    "rtx-5090": (236.0, 224.4, 237.0, 242.2, 179.0),  # z
}
_LARGE: Final[dict[str, tuple[float, ...]]] = {
    "a100-80gb": (257.0, 230.0),  # h, l
    "a100-40gb-pcie": (215.3,),  # l (A800 PCIe)
    "a100-80gb-pcie": (215.3,),
    "v100-16gb": (95.0,),  # l
    "v100-32gb": (95.0,),
    "h100": (797.5, 736.2, 719.7, 668.4, 716.0, 518.6),  # z, f
    "a6000": (95.0,),  # l
    "rtx-3060-12gb": (25.5, 25.4, 24.8),  # z
    "rtx-3080-10gb": (64.7, 63.6, 64.1, 63.9),  # z
    "rtx-4090": (155.5, 160.2, 156.9, 158.5, 158.6),  # z; l, issue 4
    "rtx-5090": (234.7, 237.0, 224.0, 220.0, 174.7, 178.9),  # z
}
_LARGE_BESIDE_BEST: Final = 0.94
"""Median of `large` over that of `best`, mean of the models of which both are known: 0.77 (A6000) to 1.11 (V100)."""
# TF32 where it was measured beside 16 bit, as a share of the data sheet: H100 0.75 to 0.81 (z), A100 0.74 and
# A800 PCIe 0.68 (l), A6000 0.78 (l), GeForce 0.98 to 1.07 (z): the shares of 16 bit within their spread.
# fp32 without tensor cores, share of the data sheet: A100 0.93 to 0.98, V100 0.83 to 0.89, H100 0.78, T4 0.52 to 0.55;
# chips whose second half of the cores does integers too reach less: RTX 3090 0.70, 4090 0.66, A6000 0.62 (z, l).
_FP32: Final = {
    "Ampere data centre": RateRange(0.90, 0.95, 0.98),
    "Volta": RateRange(0.83, 0.87, 0.89),
    "Hopper": RateRange(0.75, 0.78, 0.80),
    "Turing": RateRange(0.50, 0.60, 0.75),
    "other": RateRange(0.55, 0.66, 0.72),
}
# Watts that a whole card draws for each TFLOPS of 16-bit products, where the power limit is what holds it back (z):
# A6000 300 W for 121 TFLOPS; L40S 350 W for 267; A100 PCIe 300 W for 215 to 253. Weaker cards of the same chip have the
# same tensor cores and less power: their rate is what the power allows.
_WATTS_PER_TFLOPS: Final = {"Ampere": 300 / 121, "Ada": 350 / 267, "Hopper": 700 / 757, "Blackwell": 600 / 414}
# Products of training are not square, and two of three have a transposed operand: NVIDIA's own figures vary by a fifth
# between shapes of one size (developer.nvidia.com/blog/cuda-11-features-revealed, figure of A100 matmul rates).
_SHAPES: Final = 0.85
# GeForce cards have half the tensor rate of the same chip elsewhere and clocks above those of the data sheet: 0.97 to
# 1.12 of it was measured (z: RTX 2080, 3060, 3080, 3090, 4060 Ti, 4090, 5090).
_GEFORCE: Final = RateRange(0.82, 1.0, 1.10)
# Where neither is known: the spread of all that is.
_OTHERWISE: Final = RateRange(0.62, 0.80, 0.95)
# Products with Apple's GPUs run at the rate of fp32, of which 0.65 to 0.72 was measured (z: M4, M3 Max).
_APPLE: Final = RateRange(0.50, 0.68, 0.72)
# Element-wise kernels on large tensors, share of the data sheet: A100 80 GB 0.79, A6000 0.85, V100 0.87, 3090 Ti 0.85
# (l, "VectorMul", at 8 bytes for each operation), A800 PCIe 0.89 (l, issue 4).
_BANDWIDTH: Final = RateRange(0.76, 0.85, 0.90)
# Filling a pipeline takes a time, and so the more operations the faster a multiprocessor is. RTX 3090 Ti, with 512
# operations a cycle, reaches 74.3 of its 81.3 TFLOPS in a product of 8192 x 4096 with k = 1024 (l, micro_bench.ipynb),
# of which the last wave takes 6 %: as if k were 32 longer.
_FILL_AT_512: Final = 32
# FlashAttention-2, share of the tensor rate of the data sheet on long sequences. Forward 0.73 and backward 0.63 at best
# on A100 (arXiv 2307.08691, section 4.1); 0.73 and 0.70 on RTX A5000 (github.com/gpu-mode/ring-attention issue 10),
# 0.76 and 0.75 on RTX 3090 with a causal mask (github.com/Dao-AILab/flash-attention issue 416). Written for Ampere, it
# uses 0.35 of an H100 (arXiv 2407.08608, abstract); 0.31 and 0.30 with heads of 64 (flash-attention pull request 2688).
_FLASH: Final = (RateRange(0.60, 0.68, 0.74), RateRange(0.52, 0.62, 0.70))
_FLASH_HOPPER: Final = (RateRange(0.30, 0.35, 0.40), RateRange(0.27, 0.31, 0.35))
# cuDNN on an H100, sequences of 2048 to 16384 (arXiv 2407.08608, figures 5 and 6): without a mask forward 395 to
# 413 and 595 to 617 TFLOPS with heads of 64 and 128, backward 395 and 465 to 518; a causal mask takes 12 to 22 % of the
# forward rate (heads of 256: 450 to 509 of 580). 1.7 to 2.3 times FlashAttention-2 for training (transformers pull
# request 48163).
_CUDNN_HOPPER: Final = HeadRates(
    (RateRange(0.33, 0.37, 0.42), RateRange(0.36, 0.42, 0.46)),
    (RateRange(0.48, 0.54, 0.62), RateRange(0.43, 0.50, 0.54)),
)


def speed_of(gpu: GpuSpec) -> Speed:
    """What this model achieves; 16-bit arithmetic only where its data sheet has it."""
    if gpu.key not in _KNOWN:
        _KNOWN[gpu.key] = _speed(gpu)
    return _KNOWN[gpu.key]


_KNOWN: Final[dict[str, Speed]] = {}


def _speed(gpu: GpuSpec) -> Speed:
    apple = gpu.kind == "mps"
    share = _APPLE if apple else _share_16(gpu)
    rates: dict[Arithmetic, RateRange] = {
        "fp32": (share if apple else _fp32_share(gpu)) * (gpu.fp32_tflops.value * 1e12)
    }
    sheet: dict[Arithmetic, Figure | None] = {
        "bf16": gpu.fp32_tflops if apple else gpu.bf16_tflops,
        "fp16": gpu.fp32_tflops if apple else gpu.fp16_tflops,
        "tf32": gpu.tf32_tflops,
    }
    rates |= {name: share * (figure.value * 1e12) for name, figure in sheet.items() if figure is not None}
    forward, backward = _flash_shares(gpu)
    return Speed(
        matmul=rates,
        bandwidth=_BANDWIDTH * (gpu.bandwidth_gb_s.value * 1e9),
        flash_forward=forward,
        flash_backward=backward,
        cudnn=_CUDNN_HOPPER if _is_large(gpu) else None,
        capability=gpu.compute_capability,
        peak=(sheet["fp16"] or gpu.fp32_tflops).value * 1e12,
        multiprocessors=gpu.sm_count,
        fill={name: _fill(gpu, tflops.value) for name, tflops in {**sheet, "fp32": gpu.fp32_tflops}.items() if tflops},
    )


def _flash_shares(gpu: GpuSpec) -> tuple[RateRange, RateRange] | tuple[None, None]:
    if (gpu.compute_capability or (0, 0)) < (8, 0):
        return None, None
    return _FLASH_HOPPER if _is_large(gpu) else _FLASH


def _fill(gpu: GpuSpec, tflops: float) -> float:
    if gpu.sm_count is None or gpu.boost_mhz is None:
        return 0.0
    return _FILL_AT_512 * tflops * 1e6 / (gpu.sm_count * gpu.boost_mhz) / 512


def _share_16(gpu: GpuSpec) -> RateRange:
    """Share of the data sheet's tensor rate: measured on this model, or what its power allows."""
    if gpu.fp16_tflops is None:
        return _OTHERWISE
    peak = gpu.fp16_tflops.value
    if best := _BEST.get(gpu.key):
        large = _LARGE.get(gpu.key) or tuple(_LARGE_BESIDE_BEST * value for value in best)
        usual = median(large) / peak
        return RateRange(
            _SHAPES * min(*large, *best) / peak, usual, max(1.03 * usual, *(value / peak for value in best))
        )
    if "GeForce" in gpu.name:
        return _GEFORCE
    watts = _WATTS_PER_TFLOPS.get(gpu.architecture)
    if gpu.tdp_w is None or watts is None:
        return _OTHERWISE
    allowed = gpu.tdp_w.value / watts / peak
    return RateRange(min(_OTHERWISE.slow, 0.8 * allowed), min(_OTHERWISE.usual, allowed), _OTHERWISE.fast)


def _fp32_share(gpu: GpuSpec) -> RateRange:
    family = "Ampere data centre" if gpu.compute_capability == (8, 0) else gpu.architecture
    return _FP32.get(family, _FP32["other"])


def _is_large(gpu: GpuSpec) -> bool:
    """Chips with the new tensor instructions (wgmma), which FlashAttention-2 does not use: compute capability 9, 10."""
    return (gpu.compute_capability or (0, 0))[0] in (9, 10)

"""The time of an optimizer's update: passes over the trained parameters, or kernels launched tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

from trainwright.anatomy import Anatomy


@dataclass(frozen=True, slots=True)
class Update:
    """Passes over the trained parameters, each a read or a write of one tensor of their size.

    `kernels` are launched for each tensor, 0 where one serves many. With `waits` the host waits for the GPU at each
    tensor (it looks at a norm, say), so that nothing is launched ahead.
    """

    passes: float
    kernels: int = 0
    waits: bool = False


# Fused AdamW reads weight, gradient and two moments and writes three of them. The foreach kind is eight operations
# (`torch/optim/adam.py`, `_multi_tensor_adam`): decay 2, lerp 3, mul 2, addcmul 4, sqrt 2, div 2, add 2, addcdiv 4; the
# loop has fourteen kernels for each tensor. transformers' Adafactor launches 5996 for the 290 tensors of Qwen2.5-0.5B
# (traced). bitsandbytes' 8-bit AdamW launches one, whose Python took as long as ten: 37 ms for those tensors on the
# host beside an H200 (benchmarks/results/gpu_truth_h200.json, with 8-bit and with fused AdamW).
UPDATES: Final = {
    "adamw": Update(7),
    "adamw_foreach": Update(21),
    "adamw_loop": Update(21, kernels=14),
    "adamw_8bit": Update(4, kernels=10),
    "adafactor": Update(14, kernels=21),
}


def update_s(
    update: Update, anatomy: Anatomy, parameters: float, tensors: int, width: int, bandwidth: float, launch_s: float
) -> float:
    """Return the seconds of an update of so many parameters of `width` bytes, at so many bytes a second.

    One that waits is for a model that is trained as a whole, on every rank.
    """
    if not update.waits:
        return max(update.passes * width * parameters / bandwidth, update.kernels * tensors * launch_s)
    launching_s, pass_s = update.kernels * launch_s, update.passes * width / bandwidth
    return sum(launch_s + max(launching_s, pass_s * prod(shape)) for shape in anatomy.parameters().values())

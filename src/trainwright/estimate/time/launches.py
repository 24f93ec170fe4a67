"""What the host needs for a kernel until it is launched: Python, autograd, the dispatcher, the driver.

A host that is slower than its GPU bounds small steps. Nothing is known of the host of a GPU that is only planned for,
so it is a usual one, and the range holds slow and fast ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from trainwright.hardware.catalog import GpuSpec


@dataclass(frozen=True, slots=True)
class LaunchPace:
    """Seconds for one kernel of each pass on a usual host; how many times as long they take on slow and fast ones."""

    forward_s: float
    backward_s: float
    slow: float
    fast: float

    def times(self, factor: float) -> LaunchPace:
        """Return the pace of a host that takes `factor` times as long."""
        return LaunchPace(self.forward_s * factor, self.backward_s * factor, self.slow, self.fast)


# Forward passes run in Python, backward passes in autograd's engine. On a core of a virtual EPYC (CPU tensors of a few
# numbers, bf16 autocast, torch 2.13, transformers 5.23) Llama, GPT-2, T5 and LoRA all take 17 to 22 microseconds of
# the processor for a kernel forward and 9 to 13 backward; CUDA's launch adds 3 to 5 to both.
# A desktop is faster: a BERT layer of 36 kernels takes 433 microseconds for 256 tokens, its backward pass of 70 another
# 915 (github.com/mli/transformers-benchmarks, micro_bench.ipynb: 15.2 and 14.6 TFLOPS at batch 2, 128 tokens).
_WORKSTATION: Final = LaunchPace(12e-6, 13e-6, slow=2.0, fast=0.6)
# Hosts of data centres: 16 virtual cores beside an H200 took 38 to 45 microseconds forward and 22 to 26 backward (the
# steps of benchmarks/results/gpu_truth_h200.json that nothing else bounds: Qwen2.5-0.5B b1, its fp16 and its QLoRA,
# SmolLM2-135M b8, T5). One `nn.Linear` takes 13.5 microseconds on a DGX H100, 33 on a GH200, 37 on a GB200
# (TransformerEngine issue 2053).
_SERVER: Final = LaunchPace(40e-6, 23e-6, slow=1.8, fast=0.35)
UPDATE_LAUNCH_S: Final = 12e-6
"""Of a kernel of an optimizer's update, which autograd does not see: 11.7 for Adafactor's on the H200's host."""


def launch_pace(gpus: Iterable[GpuSpec]) -> LaunchPace:
    """Return the pace of the hosts that GPUs are found in, which all cards of a set share."""
    return _WORKSTATION if all("RTX" in gpu.name or gpu.kind == "mps" for gpu in gpus) else _SERVER

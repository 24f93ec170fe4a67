"""The machine's own figures, in a fresh process: what a context takes, and the rates that predictions build on.

    python benchmarks/gpu/constants.py cuda|cpu

prints one JSON document.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from trainwright.train.measuring import device_bytes

MATMULS = {
    "bf16 8192x8192x8192": (8192, 8192, 8192, torch.bfloat16),
    "bf16 8192x4096x14336": (8192, 4096, 14336, torch.bfloat16),
    "bf16 8192x896x4864": (8192, 896, 4864, torch.bfloat16),
    "bf16 8192x3584x152064": (8192, 3584, 152064, torch.bfloat16),
    "bf16 2048x2048x2048": (2048, 2048, 2048, torch.bfloat16),
    "fp32 4096x4096x4096": (4096, 4096, 4096, torch.float32),
}
ATTENTION = {
    "half, heads of 64": (2, 16, 16, 2048, 64, torch.bfloat16),
    "half, heads of 128, grouped": (2, 32, 8, 4096, 128, torch.bfloat16),
    "half, heads of 256": (2, 8, 8, 2048, 256, torch.bfloat16),
    "single, heads of 64": (2, 16, 16, 2048, 64, torch.float32),
}
"""Batch, heads, key heads, length, head size, dtype."""
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}


def main() -> None:
    """Print the figures of the device."""
    device = torch.device(sys.argv[1])
    found: dict[str, Any] = {"versions": versions(), "device": device.type, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        found |= gpu() | memory() | {"attention": attention()}
        found["matmul_tflops"] = {name: matmul_tflops(device, *shape) for name, shape in MATMULS.items()}
    else:
        found["matmul_tflops"] = {"fp32 512x512x512": matmul_tflops(device, 512, 512, 512, torch.float32)}
    found["copy_gb_s"] = copies(device)
    json.dump(found, sys.stdout)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that decide what a step does."""
    found = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    for name in ("torch", "transformers", "peft", "bitsandbytes", "accelerate"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def gpu() -> dict[str, Any]:
    """Return what CUDA and NVML say of the GPU."""
    import pynvml

    properties = torch.cuda.get_device_properties(0)
    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
    total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    pynvml.nvmlShutdown()
    return {
        "gpu": properties.name,
        "driver": driver,
        "compute_capability": [properties.major, properties.minor],
        "sm_count": properties.multi_processor_count,
        "cuda_total_bytes": properties.total_memory,
        "driver_total_bytes": total,
    }


def memory() -> dict[str, Any]:
    """Return what lies outside the allocator as a process goes on, and the cuBLAS workspaces inside it, in bytes."""
    cuda = torch.device("cuda", 0)
    outside = {"context": _outside_bytes()}
    x = torch.ones(1024, 1024, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    outside["after a kernel"] = _outside_bytes()
    before = torch.cuda.memory_allocated()
    y = x @ x
    forward = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    outside["after a matrix product"] = _outside_bytes()
    before = torch.cuda.memory_allocated()
    y.sum().backward()
    assert x.grad is not None
    backward = torch.cuda.memory_allocated() - before - x.grad.numel() * x.grad.element_size()
    outside["after its backward pass"] = _outside_bytes()
    workspaces = {"forward": forward, "backward, in a thread of its own": backward}
    return {"outside_bytes": outside, "cublas_workspace_bytes": workspaces}


def _outside_bytes() -> int | None:
    torch.cuda.synchronize()
    whole = device_bytes(torch.device("cuda", 0))
    return None if whole is None else whole - torch.cuda.memory_reserved()


def attention() -> dict[str, str]:
    """Return the backend that scaled_dot_product_attention takes, causal and without a mask."""
    from torch.nn.attention import SDPBackend

    found = {}
    for name, (batch, heads, key_heads, length, size, dtype) in ATTENTION.items():
        q = torch.empty(batch, heads, length, size, device="cuda", dtype=dtype, requires_grad=True)
        k = torch.empty(batch, key_heads, length, size, device="cuda", dtype=dtype, requires_grad=True)
        grouped = heads != key_heads
        choice = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=grouped)
        found[name] = SDPBackend(choice).name.lower()
    return found


def matmul_tflops(device: torch.device, rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    """Return the rate of one matrix product on random values, as zeros are multiplied faster."""
    a = torch.randn(rows, inner, device=device, dtype=dtype)
    b = torch.randn(inner, columns, device=device, dtype=dtype)
    return round(2 * rows * inner * columns / seconds(lambda: a @ b, device) / 1e12, 3)


def copies(device: torch.device) -> dict[str, float]:
    """Return rates in GB/s: within the device (bytes read and written), and from the host if that is another place."""
    size = COPIED_BYTES[device.type]
    here = torch.ones(size, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    found = {"on the device": 2 * size / seconds(lambda: there.copy_(here), device)}
    if device.type == "cuda":
        pageable = torch.ones(size, dtype=torch.uint8)
        pinned = pageable.pin_memory()
        found["from pageable host memory"] = size / seconds(lambda: there.copy_(pageable), device)
        found["from pinned host memory"] = size / seconds(lambda: there.copy_(pinned), device)
        found["to pinned host memory"] = size / seconds(lambda: pinned.copy_(there), device)
    return {name: round(rate / 1e9, 1) for name, rate in found.items()}


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the median time of an action, after a warm-up, each awaited."""
    taken = []
    for repeat in range(2 + 8):
        began_s = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat >= 2:
            taken.append(time.perf_counter() - began_s)
    return median(taken)


if __name__ == "__main__":
    main()

"""What nvidia-smi shows besides torch's allocator: CUDA context, loaded kernels, and NCCL's buffers."""

from __future__ import annotations

from trainwright.estimate.capabilities import threads_per_sm
from trainwright.estimate.request import Request
from trainwright.hardware.catalog import GpuSpec

KIB, MIB = 1 << 10, 1 << 20

CONTEXT_BYTES_PER_THREAD = 2 * KIB
"""Of each thread that the GPU can hold at a time, as the driver sets aside a stack for every one of them.

Published measurements of processes that have only just opened their context, with kernels loaded lazily (torch does so
since 1.13): 426 MiB on an RTX 6000 Ada (142 SMs of 1536 threads: 2 KiB; github.com/unslothai/unsloth-zoo/pull/1053),
256 MiB on an RTX 3090 (82 of 1536: 2.08 KiB; github.com/invoke-ai/InvokeAI/issues/9413), 307 MiB on a V100 (80 of 2048:
1.92 KiB; github.com/NVIDIA/nccl/issues/604), and, as torch's out-of-memory messages give them for other processes on
the GPU, 382 MiB on an RTX 4090 (128 of 1536: 1.99 KiB), 414 MiB on an A100 (108 of 2048: 1.92 KiB), and 522 MiB on an
H100 (132 of 2048: 1.98 KiB).
"""
LIBRARIES_BYTES = 96 * MIB
"""Kernels of torch and its libraries that a step has loaded.

Out-of-memory messages of torch 2.1 to 2.7 in public issues give it: "this process has A in use. B is allocated by
PyTorch, and C is reserved but unallocated": A - B - C, less the context as above, is 90 MiB (the median of six on
A100s) and 50 to 140 MiB on other cards.
"""
CUBLAS_HANDLES = 2
"""One for the thread of the forward pass, one for that of the backward pass."""
CUBLAS_HOPPER_BYTES = 64 * MIB
"""What cuBLAS takes for each handle on Hopper, besides the workspace that torch gives it.

Measured on an H200 with CUDA 13.0 (`constants.outside_bytes` of benchmarks/results/gpu_truth_h200.json): 518 MiB for
the context, 610 after a kernel, 676 after the first matrix product, 740 after its backward pass. Elsewhere it is small:
the 90 MiB above have both handles in them.
"""
UNKNOWN_GPU_THREADS = 108 * 2048
"""An A100's, where the model of GPU is not known."""

NCCL_KERNELS_BYTES = 238 * MIB
"""All of NCCL's kernels: it asks each for its attributes at first, which loads it (`ncclInitKernelsForDevice`).

484 MiB on an RTX 3090 with one rank and no buffers (github.com/NVIDIA/nccl/pull/2366), less the context.
"""
NCCL_SIMPLE_BYTES = 4 * MIB
NCCL_LL_BYTES = 8 * 512 * 8 * 16
NCCL_LL128_BYTES = 120 * 640 * 8 * 8
"""Buffers of the three protocols: nccl/src/init.cc, DEFAULT_BUFFSIZE, DEFAULT_LL_BUFFSIZE, DEFAULT_LL128_BUFFSIZE."""
NCCL_PAGE_BYTES = 2 * MIB
"""nccl/src/transport/p2p.cc rounds each end of a connection up to this (CUDA_IPC_MIN)."""
NCCL_SHARED_STEPS = 16
NCCL_NVLINK_CHUNK_BYTES, NCCL_PCIE_CHUNK_BYTES = 512 * KIB, 128 * KIB
"""nccl/src/init.cc, P2P_NVL_CHUNKSIZE and P2P_PCI_CHUNKSIZE."""
NCCL_NVLINK_CHANNELS_AT_MOST = 24
"""On A100 and H100 boards, as their logs say: github.com/NVIDIA/Megatron-LM/issues/516, "Channel 23/24"."""
NCCL_PCIE_CHANNELS = 2
"""As the logs say: github.com/rwth-i6/returnn/issues/1469, "Channel 01/02"."""


def outside_bytes(request: Request, gpu: GpuSpec | None) -> dict[str, int]:
    """Return what one rank takes of its GPU outside torch's allocator, in bytes by part; `gpu` None: not known."""
    if request.device != "cuda" or (gpu is not None and gpu.kind != "cuda"):
        return {}
    found = {"CUDA context": context_bytes(gpu), "libraries": libraries_bytes(request.compute_capability)}
    if request.world_size > 1:
        buffers = communicators_of(request) * communicator_bytes(request.world_size, gpu)
        found["communicators"] = NCCL_KERNELS_BYTES + buffers
    return found


def libraries_bytes(compute_capability: tuple[int, int]) -> int:
    """Return what torch's libraries have taken outside its allocator once a step has passed, in bytes."""
    handles = CUBLAS_HANDLES * CUBLAS_HOPPER_BYTES if compute_capability[0] == 9 else 0
    return LIBRARIES_BYTES + handles


def context_bytes(gpu: GpuSpec | None) -> int:
    """Return the size of a CUDA context before any kernel is loaded, in bytes."""
    if gpu is None or gpu.sm_count is None or gpu.compute_capability is None:
        return CONTEXT_BYTES_PER_THREAD * UNKNOWN_GPU_THREADS
    return CONTEXT_BYTES_PER_THREAD * gpu.sm_count * threads_per_sm(gpu.compute_capability)


def communicators_of(request: Request) -> int:
    """Return how many NCCL communicators a strategy opens.

    DDP and FSDP use torch's default group; DeepSpeed also clones it (deepspeed/utils/groups.py, _clone_world_group).
    """
    return 2 if request.strategy.startswith("zero") else 1


def communicator_bytes(world_size: int, gpu: GpuSpec | None) -> int:
    """Return the device memory of one NCCL communicator of 2.18 or later, in bytes.

    Each channel has a ring: one connection to the next rank, one from the previous one. With more than two ranks the
    tree of a channel adds the way back. A sender that is read from over NVLink keeps the buffer of the protocol Simple
    itself, the receiver those of the other two (nccl/src/transport/p2p.cc, p2pSendSetup and p2pRecvSetup); without
    NVLink the receiver has all three, in host memory if the cards cannot reach each other. To this come the buffers
    for sends through a network, made in any case (nccl/src/init.cc, ncclProxyMsgSharedInit; transport/net.cc,
    sharedBuffersInit). For two and four A100s this gives the 544 and 688 MiB that were measured there, the latter at
    the end of the trees: github.com/NVIDIA/nccl/issues/964.
    """
    over_nvlink = gpu is None or gpu.nvlink is not None
    channels = _channels(gpu) if over_nvlink else NCCL_PCIE_CHANNELS
    shared = _next_power_of_two(channels) * NCCL_SHARED_STEPS
    if not over_nvlink:
        return shared * NCCL_PCIE_CHUNK_BYTES
    send = _pages(NCCL_SIMPLE_BYTES)
    receive = _pages(NCCL_LL_BYTES + NCCL_LL128_BYTES)
    back = receive if world_size > 2 else 0
    return channels * (send + receive + back) + shared * NCCL_NVLINK_CHUNK_BYTES


def _channels(gpu: GpuSpec | None) -> int:
    """A ring each way over every link (nccl/src/graph/connect.cc doubles the rings that it finds)."""
    links = gpu.nvlink.links if gpu is not None and gpu.nvlink is not None else NCCL_NVLINK_CHANNELS_AT_MOST
    return min(2 * links, NCCL_NVLINK_CHANNELS_AT_MOST)


def _pages(buffers_bytes: int) -> int:
    """With the flags before the buffers, which begin a page of their own."""
    return -(-(buffers_bytes + 4 * KIB) // NCCL_PAGE_BYTES) * NCCL_PAGE_BYTES


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

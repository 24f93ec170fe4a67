"""What GPUs hold and what torch prefers on them, by compute capability."""

from __future__ import annotations

THREADS_PER_SM = {(6, 0): 2048, (6, 1): 2048, (7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (9, 0): 2048, (10, 0): 2048}
"""CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; all others have 1536."""
SM_COUNT = {(7, 0): 80, (7, 5): 68, (8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (10, 0): 148}
"""Of a large card of each kind, where the card is not known; 128 for others."""

PREFERS_CUDNN = (9, 10)
"""Major capabilities on which torch takes cuDNN's attention before its own (`check_prefer_cudnn_attention`)."""


def threads_per_sm(capability: tuple[int, int]) -> int:
    """Return how many threads one multiprocessor holds."""
    return THREADS_PER_SM.get(capability, 1536)


def sm_count(capability: tuple[int, int]) -> int:
    """Return how many multiprocessors a large card has."""
    return SM_COUNT.get(capability, 128)

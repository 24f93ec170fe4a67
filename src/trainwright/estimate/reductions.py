"""What a sum over rows takes beside its result, where torch splits it between thread blocks.

aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`, `global_memory_size`): every block leaves its part in memory,
with room for all its threads. The gradient of a bias or of a norm's weight is such a sum; 56 MiB for 8192 rows of 896
on an H200, as the allocator's history there says too.
"""

from __future__ import annotations

from trainwright.estimate.capabilities import sm_count, threads_per_sm

THREADS_PER_BLOCK = 512
WARP = 32
VECTOR = 4
"""Results that one thread adds up, if there is a multiple of it."""
FEWEST_VALUES, MOST_VALUES = 16, 256
"""Of one thread."""
ACCUMULATED_BYTES = 4


def row_sum_bytes(rows: int, columns: int, capability: tuple[int, int]) -> int:
    """Return the bytes that the sum of `rows` contiguous rows takes for a time, 0 where one block does it."""
    vector = next(width for width in (VECTOR, 2, 1) if columns % width == 0)
    threads = THREADS_PER_BLOCK // vector
    across, down = min(threads, _power_of_two(columns // vector)), min(threads, _power_of_two(rows))
    width = min(across, WARP)
    height = min(down, threads // width)
    width = min(across, threads // height)
    values, split_rows = rows, False
    if values >= min(height * FEWEST_VALUES, MOST_VALUES):
        values, split_rows = -(-rows // height), True
    blocks = -(-(columns // vector) // (width if split_rows else width * height))
    residents = threads_per_sm(capability) // (width * height)
    wanted = sm_count(capability) * residents
    if not split_rows or values < MOST_VALUES or blocks > wanted:
        return 0
    parts = max(min(-(-wanted // blocks), -(-values // FEWEST_VALUES)), -(-values // MOST_VALUES))
    return ACCUMULATED_BYTES * columns * parts * width * vector if parts > 1 else 0


def _power_of_two(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)

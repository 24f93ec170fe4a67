"""What means that the memory did not suffice, and what does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainwright.out_of_memory import first_words, fragmentation_advice, is_out_of_memory, says_out_of_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from hungry_task import MESSAGES

OTHERS = (
    "HIP out of memory. Tried to allocate 2.00 GiB.",
    "MPS backend out of memory (MPS allocated: 8.10 GiB, other allocations: 1.20 GiB, max allowed: 9.07 GiB).",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "Error out of memory at line 380 in file /src/csrc/ops.cu",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::4294967296 (4096)MB",
    "Unable to allocate 30.5 GiB for an array with shape (64000, 64000) and data type float64",
)
UNRELATED = (
    "CUDA error: device-side assert triggered",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:44817",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE)",
    "[Errno 28] No space left on device",
    "mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)",
)


@pytest.mark.parametrize("message", [*MESSAGES.values(), *OTHERS])
def test_every_wording_of_too_little_memory_is_recognised(message: str) -> None:
    """M01: among them those that accelerate misses (CUDA's own, cuBLAS, NCCL); also as the cause of another error."""
    assert says_out_of_memory(message)
    try:
        try:
            raise RuntimeError(message)
        except RuntimeError as error:
            raise ValueError("the batch failed") from error
    except ValueError as error:
        assert is_out_of_memory(error)


@pytest.mark.parametrize("message", UNRELATED)
def test_other_failures_are_not_taken_for_it(message: str) -> None:
    """M08, G5: a smaller batch would not mend them."""
    assert not says_out_of_memory(message)
    assert not is_out_of_memory(RuntimeError(message))


def test_an_error_without_words_is_known_by_its_kind() -> None:
    assert is_out_of_memory(MemoryError())


def test_fragmentation_is_named_only_where_it_is_the_cause_and_the_remedy_is_not_in_force() -> None:
    """M05: torch prints its advice whatever is set; here 2.07 GiB lie unused and 1.25 were asked for."""
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert fragmentation_advice(MESSAGES["torch"], {}) == setting
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        set_already = {variable: "max_split_size_mb:128,expandable_segments:True"}
        assert fragmentation_advice(MESSAGES["torch"], set_already) is None
    full = MESSAGES["torch"].replace("2.07 GiB is reserved", "20.10 MiB is reserved")
    assert fragmentation_advice(full, {}) is None
    assert fragmentation_advice(MESSAGES["CUDA"], {}) is None
    assert "expandable_segments" not in first_words(MESSAGES["torch"])

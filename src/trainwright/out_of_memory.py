"""Out of memory, recognised by what it says: torch, CUDA, cuBLAS, cuDNN, NCCL, or the host's allocator.

The one list for all who have to tell it from other failures; none of them needs torch for that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from trainwright.errors import ExitCode, UserError

Doing = Literal["starting", "training", "evaluation", "saving"]
"""What a rank was at when its memory ran out."""

LESS_MEMORY: Final = "less memory"
"""The event of a run whose layout gave way to one that needs less."""

MESSAGES: Final = (
    r"\bout of memory\b",  # CUDA, HIP, XPU and MPS of torch; cudaErrorMemoryAllocation; NCCL's "Cuda failure"; bnb
    r"\b(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT|HIPBLAS|MIOPEN)_STATUS_ALLOC_FAILED\b",
    r"\bCUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED\b",  # cuDNN 9
    r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\.",  # convolutions that found no room to work in
    r"DefaultCPUAllocator: (can't|not enough memory)",
    r"Unable to allocate .* for an array",  # NumPy
    r"Cannot allocate memory",  # ENOMEM
    r"FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",  # HPU
)
_ANY: Final = re.compile("|".join(MESSAGES), re.IGNORECASE)
_SIZE: Final = r"([\d.]+) ?(bytes|KiB|MiB|GiB)"
_TRIED: Final = re.compile(rf"(?:Tried|you tried) to allocate {_SIZE}")
_UNUSED: Final = re.compile(rf"{_SIZE} is allocated by PyTorch, and {_SIZE} is reserved by PyTorch but unallocated")
_OLD_FIGURES: Final = re.compile(rf"{_SIZE} already allocated;.*; {_SIZE} reserved in total by PyTorch")
"""torch before 2.0 names both sums in place of their difference."""
LEAST_UNUSED: Final = 0.05
"""Share of what the allocator holds; less lies about unused in any run."""
_BYTES: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TORCH_ADVICE: Final = re.compile(r"\s*If reserved but unallocated memory is large.*", re.DOTALL)
ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where torch reads the settings of its allocator; the first since 2.9."""


class OutOfMemoryError(UserError):
    """A rank's memory ran out; `doing` says at what. The launcher goes on with a layout that needs less."""

    def __init__(self, doing: Doing, said: str, figures: str | None = None) -> None:
        self.doing = doing
        super().__init__(
            f"out of memory in {doing}: {first_words(said)}",
            problems=[figures] if figures else [],
            exit_code=ExitCode.OUT_OF_MEMORY,
        )


def says_out_of_memory(text: str) -> bool:
    """Say whether a message is one of those that mean: the memory did not suffice."""
    return _ANY.search(text) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error, or what it was raised from, means that the memory did not suffice."""
    return any(isinstance(one, MemoryError) or says_out_of_memory(str(one)) for one in _chain(error))


def reason_in(error: BaseException) -> str:
    """Return the message that says so."""
    said = (str(one) or type(one).__name__ for one in _chain(error))
    return next(text for text in said if says_out_of_memory(text) or text == "MemoryError")


def first_words(said: str) -> str:
    """Return a message on one line, without torch's own advice, which may be in force already."""
    lines = [line.strip() for line in _TORCH_ADVICE.sub("", said).splitlines() if line.strip()]
    return next((line for line in lines if says_out_of_memory(line)), lines[0] if lines else "")


def fragmentation_advice(said: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the allocator's setting that may help: where what it holds unused would have sufficed, and it is not on.

    torch prints its own advice whatever is set (github.com/pytorch/pytorch/issues/173049).
    """
    tried, held = _sizes(_TRIED, said), held_bytes(said)
    if not tried or held is None:
        return None
    allocated, unused = held
    if unused < max(tried[0], LEAST_UNUSED * (allocated + unused)):
        return None
    return None if expanding_by(environment) else f"{ALLOCATOR_VARIABLES[1]}=expandable_segments:True"


def expanding_by(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the variable that lets segments of torch's allocator expand, None where none does.

    Of those that are set torch reads the first (c10/core/AllocatorConfig.h of torch 2.13).
    """
    variables = os.environ if environment is None else environment
    name = next((name for name in ALLOCATOR_VARIABLES if variables.get(name)), None)
    expands = name is not None and re.search(r"\bexpandable_segments:\s*True\b", variables[name], re.IGNORECASE)
    return name if expands else None


def held_bytes(said: str) -> tuple[float, float] | None:
    """Return the bytes that torch's message calls allocated, and those that the allocator holds beside them."""
    if old := _sizes(_OLD_FIGURES, said):
        allocated, reserved = old
        return allocated, reserved - allocated
    new = _sizes(_UNUSED, said)
    return (new[0], new[1]) if new else None


def _sizes(pattern: re.Pattern[str], said: str) -> list[float]:
    found = pattern.search(said)
    groups = found.groups() if found else ()
    return [float(number) * _BYTES[unit] for number, unit in zip(groups[::2], groups[1::2], strict=True)]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from, each once."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        yield one
        seen.add(id(one))
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)

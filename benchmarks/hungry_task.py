"""A user's own task that needs memory which is not there: `task: hungry_task:Hungry`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from trainwright.job.schema import Job
from trainwright.train.tasks.causal_lm import CausalLM

MESSAGES = {
    "torch": (
        "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total capacity of 23.64 GiB of which 705.00 MiB "
        "is free. Including non-PyTorch memory, this process has 22.94 GiB memory in use. Of the allocated memory "
        "20.41 GiB is allocated by PyTorch, and 2.07 GiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
        "See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html)"
    ),
    "CUDA": (
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda for more "
        "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
        "below might be incorrect."
    ),
    "cuBLAS": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "NCCL": (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    ),
    "host": (
        "[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "68719476736 bytes. Error code 12 (Cannot allocate memory)"
    ),
}
"""What comes of too little memory, as it is worded by whoever asked for it."""


class Hungry(CausalLM):
    """causal-lm on ranks whose memory holds so many samples a pass, and no more.

    From the `step`-th training pass on a pass of more than `room` samples raises one of MESSAGES, and from the
    `evaluation_pass`-th on an evaluation's of more than `evaluation_room`; on `ranks` alone. Who was trained on what
    is recorded in the run folder.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: Any,
        *,
        message: str,
        ranks: list[int],
        room: int = sys.maxsize,
        step: int = 1,
        evaluation_room: int = sys.maxsize,
        evaluation_pass: int = 1,
    ) -> None:
        super().__init__(job, tokenizer)
        self._message, self._ranks = MESSAGES[message], ranks
        self._pad = tokenizer.pad_token_id
        self._room = {True: room, False: evaluation_room}
        self._from_pass = {True: step, False: evaluation_pass}
        self._passes = {True: 0, False: 0}

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of causal-lm, or raise what torch does."""
        training = torch.is_grad_enabled()  # DeepSpeed's engine says it trains in an evaluation too
        self._passes[training] += 1
        hungry = int(os.environ["RANK"]) in self._ranks and self._passes[training] >= self._from_pass[training]
        if hungry and len(batch["input_ids"]) > self._room[training]:
            kind = torch.OutOfMemoryError if self._message.startswith("CUDA out of memory") else RuntimeError
            raise kind(self._message)
        if training:
            self._record(batch)
        return super().loss_sum(model, batch)

    def _record(self, batch: dict[str, torch.Tensor]) -> None:
        rows = [tokens[tokens != self._pad].tolist() for tokens in batch["input_ids"]]
        name = f"shown-{os.environ['TRAINWRIGHT_ATTEMPT']}-{os.environ['RANK']}.jsonl"
        with (Path(sys.argv[1]) / name).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

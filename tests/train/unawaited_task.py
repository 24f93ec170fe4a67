"""A user's own task whose last collective nobody waits for: `task: unawaited_task:Unawaited`."""

from __future__ import annotations

import atexit
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from trainwright.job.schema import Job
from trainwright.train.tasks.causal_lm import CausalLM


class Unawaited(CausalLM):
    """causal-lm that leaves a tensor with gloo's thread, which gives it back just when the interpreter shuts down."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        super().__init__(job, tokenizer)
        if dist.is_initialized():
            atexit.register(_reduce_at_the_end, dist.group.WORLD)


def _reduce_at_the_end(group: dist.ProcessGroup) -> None:
    sys.setswitchinterval(1000)  # the thread asks for the interpreter, and gets it from the shutdown at the earliest
    group.allreduce([torch.ones(1)])
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s:
        pass

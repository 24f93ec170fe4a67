"""Random numbers as a function of the position in the run, so that a resume needs no stored generator state."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_micro_step(seed: int, samples_seen: int, micro_step: int, rank: int) -> None:
    """Seed dropout and everything else that draws, for one micro-batch on one rank."""
    key = f"{seed}/{samples_seen}/{micro_step}/{rank}".encode()
    value = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)

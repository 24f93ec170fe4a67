"""The arithmetic of batches, steps and learning rates; every printed figure of these comes from here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

LARGE_BATCH = 256
"""Global batch from which linear scaling is usual (Goyal et al., arXiv 1706.02677, take 256 as their reference)."""


def effective_batch(micro_batch_size: int, gradient_accumulation_steps: int, ranks: int) -> int:
    """Return the examples in one optimizer step: micro-batch x accumulation x ranks."""
    return micro_batch_size * gradient_accumulation_steps * ranks


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the proportion of `weights` that add up to `total`: the largest remainders round up."""
    whole = float(sum(weights))
    exact = [total * weight / whole for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return counts


def steps_per_epoch(samples: int, global_batch_size: int, drop_last: bool) -> int:
    """Return the optimizer steps in one pass over `samples`.

    The last, smaller batch is left out with `drop_last` (floor; 0 when there are fewer samples than one batch) and is
    a step of its own without (ceil).
    """
    return samples // global_batch_size if drop_last else math.ceil(samples / global_batch_size)


def scaled_learning_rate(
    learning_rate: float, old_batch: int, new_batch: int, rule: Literal["none", "linear", "sqrt"]
) -> float:
    """Return the learning rate for `new_batch`, given the one for `old_batch`.

    `linear` multiplies by new / old (Goyal et al., arXiv 1706.02677), `sqrt` by its square root (Krizhevsky,
    arXiv 1404.5997), `none` leaves it.
    """
    ratio = new_batch / old_batch
    return learning_rate * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def learning_rate_advice(
    learning_rate: float, old_batch: int | None, new_batch: int, rule: Literal["none", "linear", "sqrt"]
) -> list[str]:
    """Return what to say about the learning rate when the global batch is not the one it was chosen for.

    The list is empty where `old_batch` is unknown or equal to `new_batch`. With the rule `none` the lines are advice:
    nothing is changed.
    """
    if old_batch is None or old_batch == new_batch:
        return []
    applied = "linear" if rule == "none" else rule
    scaled = scaled_learning_rate(learning_rate, old_batch, new_batch, applied)
    ratio = f"{new_batch}/{old_batch}"
    equation = f"{learning_rate:g} x {ratio if applied == 'linear' else f'sqrt({ratio})'} = {scaled:g}"
    if rule != "none":
        lines = [f"learning rate scaled with the batch ({rule} rule): {equation}"]
    else:
        lines = [
            f"learning rate left at {learning_rate:g}; the linear rule would give {equation} (train.lr_scaling=linear)",
            "try the original learning rate first, and change it only if training is unstable",
        ]
    if new_batch < LARGE_BATCH:
        lines.append(f"below a global batch of {LARGE_BATCH} (here {new_batch}) linear scaling may not be needed")
    lines.append("a longer warm-up can go with a larger batch (train.warmup_steps)")
    return lines

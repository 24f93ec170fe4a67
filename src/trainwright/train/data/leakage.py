"""Whether documents that share a sample see each other in the model at hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainwright.errors import UserError
from trainwright.train.data.packing import IGNORED, join_documents
from trainwright.train.tasks.protocol import Task

_LEAK_SHARE = 0.1


def assert_no_leakage(model: Any, task: Task, device: torch.device | str) -> None:
    """Check on the model itself that packed documents do not see each other; every rank must call it alike.

    Two packs of two documents each go through the model, as the task collates them, then again with other tokens in
    the first documents: the logits of the second ones must not follow. How far they would follow is measured on the
    same tokens with positions that run on, so that the check depends on no dtype, width or initialisation.

    Raises:
        UserError: they do, naming the type of the model and what to set.
    """
    inner = getattr(model, "module", model)
    vocab_size = int(inner.config.get_text_config().vocab_size)
    first, other = _probe(task, 0, vocab_size), _probe(task, vocab_size // 2, vocab_size)
    apart = _change(model, first, other, device)
    running = {"position_ids": torch.arange(first["input_ids"].shape[1]).expand_as(first["input_ids"])}
    joined = _change(model, first | running, other | running, device)
    if apart > _LEAK_SHARE * joined:
        kind = getattr(inner.config, "model_type", type(inner).__name__)
        raise UserError(
            f"packing: in a model of type `{kind}`, packed documents see each other "
            f"(logits change by {apart:.2g}; by {joined:.2g} without any separation)",
            hints=["data.packing=false", "or model.attn_implementation=sdpa, if another one is set"],
        )


def _probe(task: Task, shift: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return a batch of two packs; labels mark the second document of each, and `shift` changes the first."""
    samples = []
    for row in range(2):
        tokens = [np.arange(8) * 7 + 3 * row + offset for offset in (shift, 1)]
        labels = [np.full(8, IGNORED), tokens[1] % vocab_size]
        samples.append(
            join_documents(
                [
                    {"input_ids": (ids % vocab_size).astype(np.int32), "labels": marks.astype(np.int32)}
                    for ids, marks in zip(tokens, labels, strict=True)
                ]
            )
        )
    return task.collate(samples)


@torch.no_grad()
def _change(
    model: Any, first: dict[str, torch.Tensor], other: dict[str, torch.Tensor], device: torch.device | str
) -> float:
    """Return by how much the logits of the marked positions differ between two batches."""
    was_training = model.training
    model.eval()
    marked = (first["labels"] != IGNORED).to(device)
    logits = []
    for batch in (first, other):
        inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
        logits.append(model(**inputs, use_cache=False).logits.float()[marked])
    model.train(was_training)
    return float((logits[0] - logits[1]).abs().max())

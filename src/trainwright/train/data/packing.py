"""Several documents in one sample, kept apart.

What keeps them apart is the `position_ids` of the sample, which start at 0 again with each document: transformers
builds the block-diagonal mask from them (masking_utils.find_packed_sequence_indices), for every row of a batch, under
sdpa, eager and flex attention alike. It does so only if no attention mask and no cache of keys and values is given:
hence `use_cache=False`, and padding that is a document of its own. Flash attention reads the positions of a batch of
one row only (modeling_flash_attention_utils._is_packed_sequence); the task lays the batch out as one row for it.

An architecture may do neither (state-space layers, masks of its own); `assert_no_leakage` finds out on the model.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainwright.errors import UserError

if TYPE_CHECKING:
    from trainwright.train.tasks.protocol import Task

WINDOW_DOCUMENTS = 65_536
IGNORED = -100
_LEAK_SHARE = 0.1


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Fill packs of at most `capacity` tokens with documents; each document is in exactly one pack.

    Best fit, longest document first, within windows of documents that follow each other in the data: the waste is a
    few percent at most, and packs mix no more of the data than a window. The same lengths give the same packs. Returns
    the documents of all packs, pack by pack, and where each pack begins (packs + 1,), both int64.
    """
    assert len(lengths) > 0 and int(lengths.max()) <= capacity
    packs: list[list[int]] = []
    for start in range(0, len(lengths), WINDOW_DOCUMENTS):
        packs += _pack_window(lengths[start : start + WINDOW_DOCUMENTS], capacity, start)
    packs = sorted(sorted(documents) for documents in packs)
    offsets = np.concatenate([[0], np.cumsum([len(documents) for documents in packs])]).astype(np.int64)
    return np.array([document for documents in packs for document in documents], dtype=np.int64), offsets


def _pack_window(lengths: np.ndarray, capacity: int, first: int) -> list[list[int]]:
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room left -> packs with just that room
    rooms: list[int] = []  # its keys, sorted
    for index in np.argsort(-lengths, kind="stable"):
        length = int(lengths[index])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            room, number = capacity, len(packs)
            packs.append([])
        else:
            room = rooms[place]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        packs[number].append(first + int(index))
        left = room - length
        if left not in with_room:
            bisect.insort(rooms, left)
            with_room[left] = []
        with_room[left].append(number)
    return packs


def join_documents(documents: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return one sample of several documents: the streams one after the other, and `position_ids` for each document.

    The first label of each document is ignored: it would be learned from the end of the document before.
    """
    sample = {name: np.concatenate([document[name] for document in documents]) for name in documents[0]}
    lengths = [len(document["input_ids"]) for document in documents]
    sample["position_ids"] = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    if "labels" in sample:
        sample["labels"][sample["position_ids"] == 0] = IGNORED
    return sample


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

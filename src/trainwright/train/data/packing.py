"""Several documents in one sample, kept apart.

What keeps them apart is the `position_ids` of the sample, which start at 0 again with each document: transformers
builds the block-diagonal mask from them (masking_utils.find_packed_sequence_indices), for every row of a batch, under
sdpa, eager and flex attention alike. It does so only if no attention mask and no cache of keys and values is given:
hence `use_cache=False`, and padding that is a document of its own. Flash attention reads the positions of a batch of
one row only (modeling_flash_attention_utils._is_packed_sequence); the task lays the batch out as one row for it.

An architecture may do neither (state-space layers, masks of its own); leakage.py finds out on the model.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

import numpy as np

WINDOW_DOCUMENTS = 65_536
IGNORED = -100


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

"""One micro-batch of a request, as the collate functions of the project and of transformers make it."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.errors import UserError
from trainwright.estimate.request import Request

Batch = dict[str, torch.Tensor]
FIRST_WORD = 5


def make_batch(request: Request, config: Any, samples: int, *, pixels: torch.dtype) -> Batch:
    """Return inputs and labels of `samples` rows on the request's device; values only matter on real tensors.

    Raises:
        UserError: inputs of this kind of model are not known.
    """
    kind, device = request.auto_class, request.device
    length, target_length = request.sequence_length, request.target_length or request.sequence_length
    if kind == "AutoModelForImageClassification":
        image = (samples, config.num_channels, config.image_size, config.image_size)
        labels = torch.zeros(samples, dtype=torch.int64, device=device)
        return {"pixel_values": torch.full(image, 0.5, dtype=pixels, device=device), "labels": labels}
    if kind == "AutoModelForSpeechSeq2Seq":
        sound = (samples, config.num_mel_bins, 2 * config.max_source_positions)
        return {
            "input_features": torch.full(sound, 0.5, dtype=pixels, device=device),
            "labels": _words(samples, target_length, device),
        }
    batch = {"input_ids": _words(samples, length, device)}
    if kind == "AutoModelForSequenceClassification":
        batch["labels"] = torch.zeros(samples, dtype=torch.int64, device=device)
    elif kind == "AutoModelForSeq2SeqLM":
        batch["labels"] = _words(samples, target_length, device)
    elif kind in ("AutoModelForCausalLM", "AutoModelForMaskedLM"):
        batch["labels"] = _words(samples, length, device)
    else:
        raise UserError(f"auto_class: no inputs are known for {kind}")
    if request.batch == "packed":
        half = length // 2
        positions = torch.arange(length, device=device) if half == 0 else _two_documents(length, half, device)
        batch["position_ids"] = positions.expand(samples, length).contiguous()
    elif request.has_mask:
        mask = torch.ones(samples, length, dtype=torch.int64, device=device)
        if request.batch == "padded":
            mask[0, -1] = 0
        batch["attention_mask"] = mask
    return batch


def _words(rows: int, columns: int, device: str) -> torch.Tensor:
    return torch.full((rows, columns), FIRST_WORD, dtype=torch.int64, device=device)


def _two_documents(length: int, half: int, device: str) -> torch.Tensor:
    return torch.cat([torch.arange(half, device=device), torch.arange(length - half, device=device)])

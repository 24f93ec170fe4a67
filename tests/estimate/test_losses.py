"""The loss of an earlier transformers, traced with the one that is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tracing import LLAMA, phases, request, trace

WIDE = LLAMA | {"vocab_size": 32768}


def test_logits_are_copied_without_their_last_position_before_4_49(tmp_path: Path) -> None:
    """In the forward pass the copy in fp32 comes to what is there; the peak rises by less where it was elsewhere."""
    samples, length = 2, 128
    how = {"recipe": "transformers", "batch": "full", "method": {"type": "lora", "r": 4}}
    asked = [request(WIDE, **how), request(WIDE, **how, shifted_logits_copied=True)]
    today, before = json.loads(trace(asked, tmp_path).stdout)
    copy_bytes = samples * (length - 1) * WIDE["vocab_size"] * 4
    more = phases(before)["forward 2"] - phases(today)["forward 2"]
    assert more == pytest.approx(copy_bytes, rel=0.02)
    assert 0 < before["peak"]["allocated_bytes"] - today["peak"]["allocated_bytes"] <= copy_bytes

"""One sample as text for people, with the learned part marked."""

from __future__ import annotations

import itertools
import unicodedata
from typing import Any

from trainwright.train.data.packing import IGNORED
from trainwright.train.tasks.protocol import Sample

MOST_CHARACTERS = 2000
_OPEN, _CLOSE = "[[", "]]"


def show_example(sample: Sample, tokenizer: Any) -> str | None:
    """Return the sample decoded, what is learned in `[[ ]]`; None for samples of a task's own streams."""
    if not {"input_ids", "labels"} <= sample.keys():
        return None
    if len(sample["input_ids"]) != len(sample["labels"]):
        learned = [label for label in sample["labels"] if label != IGNORED]
        text = f"{tokenizer.decode(sample['input_ids'])} {_OPEN}{tokenizer.decode(learned)}{_CLOSE}"
        return _printable(text)
    pairs = zip(sample["input_ids"], sample["labels"], strict=True)
    parts = []
    for keep, group in itertools.groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        text = tokenizer.decode([token for token, _ in group])
        parts.append(f"{_OPEN}{text}{_CLOSE}" if keep else text)
    return _printable("".join(parts))


def _printable(text: str) -> str:
    """Return the text, cut to a readable length; characters that drive terminals are shown as codes."""
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]} ..."
    return "".join(
        character if character == "\n" or unicodedata.category(character)[0] != "C" else f"\\u{ord(character):04x}"
        for character in text
    )

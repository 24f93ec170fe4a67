"""causal-lm: a decoder that learns to answer, to chat, or to go on with a text.

    prompt/response   [bos] prompt response [eos]      the response and eos are learned
    messages          as chat.py                        what the assistant says and the token that ends it are learned
    text              [bos] text [eos]                  all is learned

bos is there if the tokenizer itself begins texts with one, so that `tokenizer(prompt)` of a finished model gives just
what it was trained on. Prompt and response are put together as they are, with nothing between them, and tokenized
each by itself: no token spans the border, where a generated answer could never have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainwright.errors import UserError
from trainwright.job.padding import needs_padding_mask
from trainwright.job.schema import Job
from trainwright.train.data.columns import Columns, find_columns, read_text
from trainwright.train.data.packing import IGNORED
from trainwright.train.data.problems import RowError
from trainwright.train.tasks.chat import Piece, chat_pieces, read_messages
from trainwright.train.tasks.padding import attention_mask, pad_right
from trainwright.train.tasks.protocol import Sample
from trainwright.train.tasks.token_loss import cross_entropy_sum

if TYPE_CHECKING:
    import torch


class CausalLM:
    """Next-token prediction on the answers, or on all tokens with `data.loss_on: all`."""

    streams: tuple[str, ...] = ("input_ids", "labels")
    packable = True

    def __init__(self, job: Job, tokenizer: Any) -> None:
        """Take the job's columns and `loss_on`.

        Raises:
            UserError: the tokenizer has no end-of-sequence token, so that an answer could not end.
        """
        if tokenizer.eos_token_id is None:
            raise UserError("causal-lm needs a tokenizer with an eos_token; this one has none")
        self._tokenizer = tokenizer
        self._named = job.data.columns
        self._learn_all = job.data.loss_on == "all"
        # Flash attention keeps packed documents apart in a batch of one row only; see packing.py.
        self._one_row = job.model.attn_implementation == "flash_attention_2"
        self._masks = True
        self._columns: Columns | None = None
        self._eos = [int(tokenizer.eos_token_id)]
        begins = tokenizer("")["input_ids"][:1]
        self._bos = [int(begins[0])] if begins and begins[0] == tokenizer.bos_token_id else []
        self._special = set(tokenizer.all_special_ids) | {
            token for token, added in tokenizer.added_tokens_decoder.items() if added.special
        }

    def auto_model_class(self) -> str:
        """Return the transformers class of decoders."""
        return "AutoModelForCausalLM"

    def use_config(self, config: Mapping[str, Any]) -> None:
        """Leave the attention mask out where the model does without."""
        self._masks = needs_padding_mask(config)

    def needed_columns(self, names: Sequence[str]) -> list[str]:
        """Find the columns to read among `names`; a UserError says what to set if none is known."""
        self._columns = find_columns(names, self._named)
        return self._columns.names

    def encode(self, row: dict[str, object]) -> Sample | None:
        """Return the `input_ids` and `labels` of a row, as long as each other; None for an empty answer or text."""
        sample = self.encode_many([row])[0]
        if isinstance(sample, RowError):
            raise sample
        return sample

    def encode_many(self, rows: Sequence[dict[str, object]]) -> list[Sample | RowError | None]:
        """Encode rows with one call of the tokenizer, which then uses all its threads."""
        documents = [self._pieces_or_error(row) for row in rows]
        texts = [
            piece.content
            for document in documents
            if isinstance(document, list)
            for piece in document
            if isinstance(piece.content, str)
        ]
        ids = iter(self._tokenize(texts))
        return [self._assemble(document, ids) if isinstance(document, list) else document for document in documents]

    def targets(self, sample: Sample) -> int:
        """Return the number of labels learned; the first never is, as nothing comes before it."""
        return sum(label != IGNORED for label in sample["labels"][1:])

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Pad to the longest: `input_ids`, `labels`, an `attention_mask` if needed, `position_ids` of packed samples.

        The padding of packed samples is a document of its own, with positions from 0; for flash attention they follow
        each other in one row, without padding.
        """
        pad = int(self._tokenizer.pad_token_id)
        rows = {name: [sample[name] for sample in samples] for name in samples[0]}
        if "position_ids" not in rows:
            batch = {
                "input_ids": pad_right(rows["input_ids"], pad),
                "labels": pad_right(rows["labels"], IGNORED),
            }
            return batch | {"attention_mask": attention_mask(rows["input_ids"])} if self._masks else batch
        if self._one_row:
            rows = {name: [np.concatenate(values)] for name, values in rows.items()}
        longest = max(len(row) for row in rows["input_ids"])
        positions = [np.concatenate([row, np.arange(longest - len(row))]) for row in rows["position_ids"]]
        return {
            "input_ids": pad_right(rows["input_ids"], pad),
            "labels": pad_right(rows["labels"], IGNORED),
            "position_ids": pad_right(positions, 0),
        }

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the cross entropy summed over the targets."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        return cross_entropy_sum(logits, batch["labels"][:, 1:])

    def _pieces_or_error(self, row: dict[str, object]) -> list[Piece] | RowError | None:
        try:
            return self._pieces(row)
        except RowError as error:
            return error

    def _pieces(self, row: dict[str, object]) -> list[Piece] | None:
        if self._columns is None:
            self.needed_columns(list(row))
        columns = self._columns
        assert columns is not None
        if columns.messages is not None:
            messages = read_messages(row, columns.messages)
            if not any(message["role"] == "assistant" and message["content"] for message in messages):
                return None
            pieces = chat_pieces(messages, columns.messages, self._tokenizer, self._eos)
            return pieces if self._tokenizer.chat_template else [Piece(self._bos, False), *pieces]
        if columns.text is not None:
            text = read_text(row, columns.text)
            return [Piece(self._bos, False), Piece(text, True), Piece(self._eos, True)] if text else None
        prompt, response = columns.read_pair(row)
        if not response:
            return None
        return [Piece(self._bos, False), Piece(prompt, False), Piece(response, True), Piece(self._eos, True)]

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _assemble(self, pieces: list[Piece], ids: Iterator[list[int]]) -> Sample:
        input_ids: list[int] = []
        learned: list[bool] = []
        for piece in pieces:
            tokens = next(ids) if isinstance(piece.content, str) else piece.content
            input_ids += tokens
            learned += [piece.learned] * len(tokens)
        if self._columns is not None and self._columns.messages is not None and self._tokenizer.chat_template:
            self._learn_ends(input_ids, learned)
        if self._learn_all:
            learned = [True] * len(input_ids)
        labels = [token if keep else IGNORED for token, keep in zip(input_ids, learned, strict=True)]
        if labels:
            labels[0] = IGNORED
        return {"input_ids": input_ids, "labels": labels}

    def _learn_ends(self, input_ids: list[int], learned: list[bool]) -> None:
        """Learn the special token that a template puts after each answer; add eos if none comes after the last."""
        for index in range(1, len(input_ids)):
            if learned[index - 1] and not learned[index] and input_ids[index] in self._special:
                learned[index] = input_ids[index - 1] not in self._special
        last = max((index for index, keep in enumerate(learned) if keep), default=len(learned))
        if not self._special.intersection(input_ids[last:]):
            input_ids += self._eos
            learned.append(True)

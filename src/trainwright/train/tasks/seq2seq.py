"""seq2seq: an encoder reads the prompt, a decoder learns the response (T5 and its like).

The prompt is read in the tokenizer's chat template where it has one, else as it is, or as `data.template` says. A
response ends with the tokenizer's end-of-sequence token, and so does a prompt that is in no chat template, also when
they are cut to `data.max_length`, which holds for each of them. Labels that are padding become -100, and a batch is
padded to its own longest (requirement S2-41).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainwright.errors import UserError
from trainwright.job.schema import Job
from trainwright.train.data.columns import Columns, find_columns
from trainwright.train.data.packing import IGNORED
from trainwright.train.data.problems import RowError
from trainwright.train.tasks.padding import attention_mask, pad_right
from trainwright.train.tasks.protocol import Sample
from trainwright.train.tasks.template import choose_template
from trainwright.train.tasks.token_loss import cross_entropy_sum

if TYPE_CHECKING:
    import torch


class Seq2Seq:
    """The response's tokens, given the prompt."""

    streams: tuple[str, ...] = ("input_ids", "labels")
    packable = False

    def __init__(self, job: Job, tokenizer: Any) -> None:
        """Take the job's columns.

        Raises:
            UserError: the tokenizer has no end-of-sequence token; or no chat template, which the job asks for.
        """
        if tokenizer.eos_token_id is None:
            raise UserError("seq2seq needs a tokenizer with an eos_token; this one has none")
        self._tokenizer = tokenizer
        self._named = job.data.columns
        self._columns: Columns | None = None
        self._eos = int(tokenizer.eos_token_id)
        self._pad = int(tokenizer.pad_token_id)
        self.template = choose_template(job.data.template, tokenizer, without_one="none")

    def auto_model_class(self) -> str:
        """Return the transformers class of encoder-decoders."""
        return "AutoModelForSeq2SeqLM"

    def needed_columns(self, names: Sequence[str]) -> list[str]:
        """Find the prompt and response columns among `names`; a UserError says what to set if they are not known."""
        self._columns = find_columns(names, self._named, pairs_only=True)
        return self._columns.names

    def encode(self, row: dict[str, object]) -> Sample | None:
        """Return `input_ids` of the prompt and `labels` of the response; None for an empty response."""
        sample = self.encode_many([row])[0]
        if isinstance(sample, RowError):
            raise sample
        return sample

    def encode_many(self, rows: Sequence[dict[str, object]]) -> list[Sample | RowError | None]:
        """Encode rows with one call of the tokenizer, which then uses all its threads."""
        pairs = [self._pair_or_error(row) for row in rows]
        texts = [text for pair in pairs if isinstance(pair, tuple) for text in pair]
        ids = iter(self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else [])
        return [self._sample(next(ids), next(ids)) if isinstance(pair, tuple) else pair for pair in pairs]

    def truncate(self, sample: Sample, max_length: int) -> Sample:
        """Cut the prompt and the response each to `max_length` tokens, the last of which stays the end of sequence."""
        return {
            name: tokens if len(tokens) <= max_length else tokens[: max_length - 1] + tokens[-1:]
            for name, tokens in sample.items()
        }

    def targets(self, sample: Sample) -> int:
        """Return the number of labels learned: the decoder starts from a token of its own, so that all count."""
        return sum(label != IGNORED for label in sample["labels"])

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Pad prompts and responses each to their longest: `input_ids`, `attention_mask` and `labels`."""
        prompts = [sample["input_ids"] for sample in samples]
        return {
            "input_ids": pad_right(prompts, self._pad),
            "attention_mask": attention_mask(prompts),
            "labels": pad_right([sample["labels"] for sample in samples], IGNORED),
        }

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the cross entropy summed over the targets.

        Never the model's own loss: that of T5 is a mean over one micro-batch, which no later division makes right.
        """
        labels = batch["labels"]
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = model(**inputs, decoder_input_ids=_decoder_input_ids(model, labels, self._pad), use_cache=False).logits
        return cross_entropy_sum(logits, labels)

    def _pair_or_error(self, row: dict[str, object]) -> tuple[str, str] | RowError | None:
        try:
            if self._columns is None:
                self.needed_columns(list(row))
            assert self._columns is not None
            prompt, response = self._columns.read_pair(row)
        except RowError as error:
            return error
        return (self._in_template(prompt), response) if response else None

    def _in_template(self, prompt: str) -> str:
        if self.template.text is not None:
            return self.template.before_answer(prompt)
        message = [{"role": "user", "content": prompt}]
        return str(self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))

    def _sample(self, prompt: list[int], response: list[int]) -> Sample:
        labels = [*response, self._eos]
        if self._pad != self._eos:
            labels = [IGNORED if label == self._pad else label for label in labels]
        return {"input_ids": prompt if self.template.text is None else [*prompt, self._eos], "labels": labels}


def _decoder_input_ids(model: Any, labels: torch.Tensor, pad: int) -> torch.Tensor:
    """Return the labels one place to the right, behind the token from which the decoder starts."""
    inner = getattr(model, "module", model)  # DistributedDataParallel passes no attributes on
    own = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        made: torch.Tensor = own(labels=labels)
        return made
    shifted = labels.masked_fill(labels == IGNORED, pad).roll(1, dims=1)
    shifted[:, 0] = inner.config.decoder_start_token_id
    return shifted

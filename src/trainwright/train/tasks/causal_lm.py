"""causal-lm: a decoder that learns to answer, to chat, or to go on with a text.

    prompt/response   in the chat template, as template.py says   the response and what ends it are learned
    messages          as chat.py says                             so is what the assistant says each time
    text              [bos] text [eos]                            all is learned

bos is there if the tokenizer itself begins texts with one. Where a pair is in no chat template, the prompt with what
stands around it is tokenized by itself, and so is the response: no token spans the border, where a generated answer
could never have one.
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
from trainwright.train.tasks.chat import Piece, Rendered, chat_document, pair_document, plain_chat, read_messages
from trainwright.train.tasks.padding import attention_mask, pad_right
from trainwright.train.tasks.protocol import Sample
from trainwright.train.tasks.template import Template, choose_template
from trainwright.train.tasks.token_loss import cross_entropy_sum

if TYPE_CHECKING:
    import torch

Document = Rendered | list[Piece]


class CausalLM:
    """Next-token prediction on the answers, or on all tokens with `data.loss_on: all`."""

    streams: tuple[str, ...] = ("input_ids", "labels")
    packable = True

    def __init__(self, job: Job, tokenizer: Any) -> None:
        """Take the job's columns and `loss_on`.

        Raises:
            UserError: the tokenizer has no end-of-sequence token, so that an answer could not end; or no chat template,
                which the job asks for.
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
        begins_with = str(tokenizer.bos_token) if self._bos else ""
        self._asked = job.data.template
        self._template = choose_template(job.data.template, tokenizer, without_one="plain", begins=begins_with)
        self._special = set(tokenizer.all_special_ids) | {
            token for token, added in tokenizer.added_tokens_decoder.items() if added.special
        }

    def auto_model_class(self) -> str:
        """Return the transformers class of decoders."""
        return "AutoModelForCausalLM"

    def use_config(self, config: Mapping[str, Any]) -> None:
        """Leave the attention mask out where the model does without."""
        self._masks = needs_padding_mask(config)

    @property
    def template(self) -> Template | None:
        """How prompts and answers are put together; None for what has neither, and while the columns are not known."""
        pairs = self._columns is not None and self._columns.prompt is not None
        chats = self._columns is not None and self._columns.messages is not None
        return self._template if pairs or (chats and self._template.text is None) else None

    def needed_columns(self, names: Sequence[str]) -> list[str]:
        """Find the columns to read among `names`.

        Raises:
            UserError: none is known, with what to set; or the job gives a template to what is no prompt and response.
        """
        self._columns = find_columns(names, self._named)
        fitting = ("auto", "chat") if self._columns.messages is not None else ("auto",)
        if self._columns.prompt is None and self._asked not in fitting:
            found = self._columns.describe()
            raise UserError(
                f"data.template={self._asked!r} is for a prompt and a response; the data has {found}",
                hints=["remove data.template: chats go through the tokenizer's chat template, plain text through none"],
            )
        return self._columns.names

    def encode(self, row: dict[str, object]) -> Sample | None:
        """Return the `input_ids` and `labels` of a row, as long as each other; None for an empty answer or text."""
        sample = self.encode_many([row])[0]
        if isinstance(sample, RowError):
            raise sample
        return sample

    def encode_many(self, rows: Sequence[dict[str, object]]) -> list[Sample | RowError | None]:
        """Encode rows with one call of the tokenizer, which then uses all its threads."""
        documents = [self._document_or_error(row) for row in rows]
        whole = [document for document in documents if isinstance(document, Rendered)]
        pieces = [piece for document in documents if isinstance(document, list) for piece in document]
        texts = iter(self._tokenize([piece.content for piece in pieces if isinstance(piece.content, str)]))
        rendered = iter(self._tokenize_rendered(whole))
        samples: list[Sample | RowError | None] = []
        for document in documents:
            if isinstance(document, list):
                samples.append(self._assemble(document, texts))
            else:
                samples.append(self._sample(*next(rendered)) if isinstance(document, Rendered) else document)
        return samples

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

    def _document_or_error(self, row: dict[str, object]) -> Document | RowError | None:
        try:
            document = self._document(row)
        except RowError as error:
            return error
        return document if self._tokenizer.is_fast or not isinstance(document, Rendered) else document.pieces()

    def _document(self, row: dict[str, object]) -> Document | None:
        if self._columns is None:
            self.needed_columns(list(row))
        columns = self._columns
        assert columns is not None
        if columns.messages is not None:
            messages = read_messages(row, columns.messages)
            if not any(message["role"] == "assistant" and message["content"] for message in messages):
                return None
            if self._template.text is None:
                return chat_document(messages, columns.messages, self._tokenizer)
            return [Piece(self._bos, False), *plain_chat(messages, self._eos)]
        if columns.text is not None:
            text = read_text(row, columns.text)
            return [Piece(self._bos, False), Piece(text, True), Piece(self._eos, True)] if text else None
        prompt, response = columns.read_pair(row)
        return self._pair(prompt, response, str(columns.response)) if response else None

    def _pair(self, prompt: str, response: str, column: str) -> Document:
        if self._template.text is None:
            return pair_document(prompt, response, column, self._tokenizer)
        answer = [Piece(response, True), Piece(self._eos, True)]
        if self._template.value == "none":  # as `tokenizer(prompt)` gives it, of which bos is no part of the text
            return [Piece(self._bos, False), Piece(prompt, False), *answer]
        return [Piece(self._template.before_answer(prompt), False), *answer]

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._encoded(texts)["input_ids"] if texts else []
        return ids

    def _tokenize_rendered(self, documents: list[Rendered]) -> Iterator[tuple[list[int], list[bool]]]:
        if not documents:
            return
        encoded = self._encoded([document.text for document in documents], return_offsets_mapping=True)
        for document, ids, offsets in zip(documents, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            learned = document.learned(offsets)
            self._learn_ends(ids, learned)
            yield ids, learned

    def _encoded(self, texts: list[str], **more: bool) -> Any:
        return self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **more,
        )

    def _assemble(self, pieces: list[Piece], ids: Iterator[list[int]]) -> Sample:
        input_ids: list[int] = []
        learned: list[bool] = []
        for piece in pieces:
            tokens = next(ids) if isinstance(piece.content, str) else piece.content
            input_ids += tokens
            learned += [piece.learned] * len(tokens)
        template = self.template
        if template is not None and template.text is None:
            self._learn_ends(input_ids, learned)
        return self._sample(input_ids, learned)

    def _sample(self, input_ids: list[int], learned: list[bool]) -> Sample:
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

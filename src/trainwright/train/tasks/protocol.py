"""What a task is: how rows become samples, samples a batch, and a batch a loss.

A task of your own is a class named as `module:Class` in the job. It is made once in each process as
`Class(job, tokenizer, **job.task_options)` and has the six members of `Task`; it need not inherit from anything.
Five more are used where they are there:

    needed_columns(names) -> list[str]    which columns encode() reads, so that no others are read from parquet
    encode_many(rows) -> list[Sample | None | RowError]    faster than encode() row by row
    truncate(sample, max_length) -> Sample    instead of cutting every stream at its end
    use_config(config) -> None    takes the content of the model's config.json, before the first batch is collated
    template    how prompts and answers are put together, a Template; told before the run and kept with it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainwright.train.data.problems import RowError

if TYPE_CHECKING:
    import torch

Sample = dict[str, list[int]]
"""Named integer streams of one example, such as `input_ids` and `labels` (-100: not learned)."""


class Task(Protocol):
    """One kind of training: causal-lm, seq2seq, or a user's own."""

    streams: tuple[str, ...]
    """Names of a sample's streams, stored in the cache."""
    packable: bool
    """Whether samples may share a sequence; then streams are as long as each other and one is `input_ids`."""

    def encode(self, row: dict[str, object]) -> Sample | None:
        """Return the sample of a row, however long; None if there is nothing to learn in it.

        Raises:
            RowError: the row is not what the task expects.
        """
        ...

    def targets(self, sample: Sample) -> int:
        """Return the number of target tokens of a sample, its weight in the loss."""
        ...

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        """Return the batch, int64 tensors of shape (samples, longest)."""
        ...

    def loss_sum(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the SUM of the loss over the batch's target tokens, a scalar in fp32 or fp64.

        The step loop divides by the number of targets of the whole global batch.
        """
        ...

    def auto_model_class(self) -> str:
        """Return the name of the transformers class that loads the model, such as `AutoModelForCausalLM`."""
        ...


MEMBERS = ("streams", "packable", "encode", "targets", "collate", "loss_sum", "auto_model_class")


def needed_columns(task: Task, names: Sequence[str]) -> list[str]:
    """Return the columns that the task reads, out of those the data has."""
    chosen = getattr(task, "needed_columns", None)
    return list(names) if chosen is None else list(chosen(names))


def encode_rows(task: Task, rows: Sequence[dict[str, object]]) -> list[Sample | RowError | None]:
    """Return the samples of rows, in their order; a row that cannot be read gives its error."""
    together = getattr(task, "encode_many", None)
    return [_encode(task, row) for row in rows] if together is None else list(together(rows))


def truncate(task: Task, sample: Sample, max_length: int) -> Sample:
    """Return the sample with no stream longer than `max_length`."""
    own = getattr(task, "truncate", None)
    if own is None:
        return {name: tokens[:max_length] for name, tokens in sample.items()}
    shortened: Sample = own(sample, max_length)
    return shortened


def use_config(task: Task, config: Mapping[str, Any]) -> None:
    """Tell the task which model it trains."""
    told = getattr(task, "use_config", None)
    if told is not None:
        told(config)


def _encode(task: Task, row: dict[str, object]) -> Sample | RowError | None:
    try:
        return task.encode(row)
    except RowError as error:
        return error

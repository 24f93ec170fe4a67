"""The tokenizer and the token caches of a run, made from its data."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.errors import UserError
from trainwright.job.schema import BUILT_IN_TASKS, Job, TrainTokenizer
from trainwright.train.data import cache
from trainwright.train.data.columns import check_text, find_columns
from trainwright.train.data.data_request import sha256_of
from trainwright.train.data.encoding import DataPart, encode_into, require_some
from trainwright.train.data.example import show_example
from trainwright.train.data.order import held_out, sampled
from trainwright.train.data.packing import pack
from trainwright.train.data.problems import Problems, RowError
from trainwright.train.data.rows import Located, column_names, read_rows
from trainwright.train.data.sources import Source, find_source
from trainwright.train.data.tokenizer import (
    SAMPLED_ROWS,
    content_sha256,
    ensure_pad_token,
    load_tokenizer,
    save_tokenizer,
    texts_of,
    tokenizer_source,
    train_tokenizer,
)
from trainwright.train.tasks import load_task
from trainwright.train.tasks.protocol import Task, needed_columns
from trainwright.train.tasks.template import Template

PartName = str
_HINTS = ("mend or remove these rows; nothing was trained",)


class Preparation:
    """One job's data on their way to token caches."""

    def __init__(self, job: Job, request: Mapping[str, Any]) -> None:
        """Find the data files and which rows are held out.

        Raises:
            UserError: the files are not there, or too few rows to hold any out.
        """
        self._job = job
        self._request = request
        self._train = find_source(str(job.data.path), job.data.split)
        self._held_out = self._choose_held_out()
        self.template: Template | None = None
        """How prompts and answers are put together, known once the caches are filled; None where nothing is."""
        self._root = Path(job.data.cache_dir or "~/.cache/trainwright").expanduser().absolute() / "tokens"

    def make_tokenizer(self, folder: Path) -> tuple[Any, str | None]:
        """Load or train the tokenizer, save it to `folder`, and return it with a note for people, if there is one."""
        chosen = self._job.model.tokenizer
        if isinstance(chosen, TrainTokenizer):
            print(
                f"tokenizer: training {chosen.vocab_size:,} tokens on {self._train.name}", file=sys.stderr, flush=True
            )
            tokenizer = self._train_tokenizer(chosen.vocab_size)
        else:
            tokenizer = load_tokenizer(*tokenizer_source(self._job))
        note = ensure_pad_token(tokenizer)
        if isinstance(chosen, TrainTokenizer) and len(tokenizer) < chosen.vocab_size:
            note = f"the texts give {len(tokenizer):,} different tokens, fewer than the {chosen.vocab_size:,} asked for"
        save_tokenizer(tokenizer, folder)
        return tokenizer, note

    def fill_caches(self, tokenizer: Any) -> dict[PartName, Path]:
        """Return the finished cache of `train`, and of `eval` if there is evaluation data, making what is not there.

        Raises:
            UserError: up to ten problems of the rows at once, each with file and line; no row can be used; the task
                does not fit.
        """
        task = load_task(self._job, tokenizer)
        needed_columns(task, column_names(self._train))
        self.template = getattr(task, "template", None)
        if self._job.data.packing and not task.packable:
            raise UserError(
                f"data.packing: samples of the task `{self._job.task}` cannot share a sequence",
                hints=["data.packing=false"],
            )
        digest = content_sha256(tokenizer)
        if self._job.data.eval_path is None:
            parts = ["train"] if self._held_out is None else ["train", "eval"]
            return self._fill(task, tokenizer, digest, self._train, parts)
        evaluation = find_source(self._job.data.eval_path, self._job.data.split)
        return self._fill(task, tokenizer, digest, self._train, ["train"]) | self._fill(
            task, tokenizer, digest, evaluation, ["eval"]
        )

    def _choose_held_out(self) -> np.ndarray | None:
        share = self._job.data.eval_split
        if share == 0:
            return None
        rows = self._count_rows()
        if rows < 2:
            raise UserError(f"data.eval_split={share:g} needs two rows at least; {self._train.name} has {rows}")
        return held_out(self._job.train.seed, rows, share)

    def _count_rows(self) -> int:
        first_column = column_names(self._train)[:1]
        return sum(1 for _ in self._located(self._train, Problems(self._train.name, _HINTS), first_column))

    def _train_tokenizer(self, vocab_size: int) -> Any:
        """Train on a sample of the training rows; held-out rows have no say in it."""
        names = column_names(self._train)
        if self._job.task in BUILT_IN_TASKS:
            names = find_columns(names, self._job.data.columns, pairs_only=self._job.task == "seq2seq").names
        usable = np.ones(self._count_rows(), dtype=bool) if self._held_out is None else ~self._held_out
        chosen = np.zeros(len(usable), dtype=bool)
        chosen[np.flatnonzero(usable)[sampled(self._job.train.seed, int(usable.sum()), SAMPLED_ROWS)]] = True
        problems = Problems(self._train.name, _HINTS)

        def texts() -> Iterator[str]:
            for _, row in itertools.compress(self._located(self._train, problems, names), chosen):
                for name in names:
                    for text in texts_of(row.get(name)):
                        with contextlib.suppress(RowError):  # named with all others when the row is encoded
                            yield check_text(text, name)

        return train_tokenizer(texts(), vocab_size, ends_with_eos=self._job.task == "seq2seq")

    def _located(self, source: Source, problems: Problems, columns: list[str]) -> Iterator[Located]:
        yield from read_rows(source, problems, columns=columns, limit=self._job.data.limit)
        problems.raise_if_any()

    def _fill(
        self, task: Task, tokenizer: Any, digest: str, source: Source, parts: list[PartName]
    ) -> dict[PartName, Path]:
        # Only the part's own file is in its key, so that other evaluation data leave the training cache as it is.
        own = {**self._request, "tokenizer": digest, "train": source.digests(), "eval": None}
        keys = {part: sha256_of({**own, "part": part}) for part in parts}
        paths = {part: cache.cache_path(self._root, key) for part, key in keys.items()}
        missing = {part: keys[part] for part in parts if cache.read_meta(paths[part]) is None}
        if missing:
            self._encode(task, tokenizer, source, missing)
        return paths

    def _encode(self, task: Task, tokenizer: Any, source: Source, keys: dict[PartName, str]) -> None:
        columns = needed_columns(task, column_names(source))
        problems = Problems(source.name, _HINTS)
        with contextlib.ExitStack() as writers:
            parts = {
                name: DataPart(name, writers.enter_context(cache.CacheWriter(self._root, key, task.streams)))
                for name, key in keys.items()
            }
            encode_into(
                self._located(source, problems, columns),
                task,
                self._router(source, parts),
                max_length=self._job.data.max_length,
                too_long=self._job.data.too_long,
                problems=problems,
            )
            problems.raise_if_any()
            for part in parts.values():
                require_some(part, source.name)
                # Evaluation is not packed: its loss is the same, and eval.limit counts examples.
                packed = self._job.data.packing and part.name == "train"
                part.writer.finish(
                    {
                        "counts": dataclasses.asdict(part.counts),
                        "said": part.counts.describe(),
                        "columns": columns,
                        "example": show_example(part.example, tokenizer) if part.example is not None else None,
                    },
                    pack(part.writer.lengths(), self._job.data.max_length) if packed else None,
                )

    def _router(self, source: Source, parts: dict[PartName, DataPart]) -> Callable[[int], DataPart | None]:
        if source is not self._train or self._held_out is None:
            (only,) = parts.values()
            return lambda number: only
        mask = self._held_out
        return lambda number: parts.get("eval" if mask[number] else "train")

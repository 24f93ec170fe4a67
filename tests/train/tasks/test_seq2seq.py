"""seq2seq: S2-41, and a loss that is a sum over tokens whatever the model's own loss is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from trainwright.errors import UserError
from trainwright.job.schema import Job
from trainwright.train.tasks.seq2seq import Seq2Seq

MakeJob = Callable[..., Job]
PAIRS = [("question", "answer"), ("a longer question 12", "Paris is in France."), ("q", "1")]


@pytest.fixture
def task(make_job: MakeJob, tokenizer: Any) -> Seq2Seq:
    return Seq2Seq(make_job("seq2seq"), tokenizer)


def _samples(task: Seq2Seq) -> list[dict[str, np.ndarray]]:
    samples = [task.encode({"prompt": prompt, "response": response}) for prompt, response in PAIRS]
    return [{name: np.array(tokens, dtype=np.int32) for name, tokens in s.items()} for s in samples if s is not None]


def _t5(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    dimensions = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 320}
    start = {"decoder_start_token_id": tokenizer.pad_token_id}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **dimensions, **special, **start)).eval()


def test_both_sides_end_and_labels_are_padded_with_minus_100(task: Seq2Seq, tokenizer: Any) -> None:
    """S2-41: the end of sequence on both, labels that pad are -100, a batch padded to its own longest."""
    samples = _samples(task)
    batch = task.collate(samples)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert all(sample[name][-1] == tokenizer.eos_token_id for sample in samples for name in ("input_ids", "labels"))
    for name, fill in (("input_ids", tokenizer.pad_token_id), ("labels", -100)):
        longest = max(len(sample[name]) for sample in samples)
        assert tuple(batch[name].shape) == (3, longest) and batch[name].dtype == torch.int64
        for row, sample in zip(batch[name], samples, strict=True):
            assert row.tolist() == sample[name].tolist() + [fill] * (longest - len(sample[name]))
    assert batch["attention_mask"].sum(1).tolist() == [len(sample["input_ids"]) for sample in samples]


def test_a_pad_token_in_a_response_is_not_learned(task: Seq2Seq) -> None:
    """S2-41: labels equal to pad become -100."""
    sample = task.encode({"prompt": "p", "response": "a<pad>b"})
    assert sample is not None
    assert sample["labels"].count(-100) == 1 and task.targets(sample) == 3


def test_loss_sum_is_the_mean_over_tokens_times_the_targets(task: Seq2Seq, tokenizer: Any) -> None:
    samples, model = _samples(task), _t5(tokenizer)
    batch = task.collate(samples)
    targets = sum(task.targets({name: t.tolist() for name, t in sample.items()}) for sample in samples)
    own = model(**batch).loss.item()  # over one batch, T5's own mean is right
    assert task.loss_sum(model, batch).item() == pytest.approx(own * targets, rel=1e-5)
    one_by_one = sum(task.loss_sum(model, task.collate([sample])).item() for sample in samples)
    assert task.loss_sum(model, batch).item() == pytest.approx(one_by_one, rel=1e-5)


def test_loss_sum_is_a_cross_entropy_computed_by_hand(task: Seq2Seq, tokenizer: Any) -> None:
    model, sample = _t5(tokenizer), _samples(task)[1]
    labels = torch.from_numpy(sample["labels"].astype(np.int64))
    start = torch.tensor([tokenizer.pad_token_id])
    logits = model(
        input_ids=torch.from_numpy(sample["input_ids"].astype(np.int64))[None],
        decoder_input_ids=torch.cat([start, labels[:-1]])[None],
    ).logits[0]
    by_hand = -functional.log_softmax(logits, -1)[torch.arange(len(labels)), labels].sum()
    assert task.loss_sum(model, task.collate([sample])).item() == pytest.approx(by_hand.item(), rel=1e-5)


class _Wrapped(torch.nn.Module):
    """As DistributedDataParallel does, it passes calls on and attributes not."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.module(**inputs)


class _WithoutShift(_Wrapped):
    """A model that brings no shift of its own: the labels are shifted behind the token its config names."""

    @property
    def config(self) -> Any:
        return SimpleNamespace(decoder_start_token_id=self.module.config.decoder_start_token_id)


def test_wrapped_models_and_those_without_a_shift_give_the_same_loss(task: Seq2Seq, tokenizer: Any) -> None:
    model = _t5(tokenizer)
    batch = task.collate(_samples(task))
    expected = task.loss_sum(model, batch).item()
    assert task.loss_sum(_Wrapped(model), batch).item() == expected
    assert task.loss_sum(_Wrapped(_WithoutShift(model)), batch).item() == expected


def test_cutting_keeps_the_end_of_sequence(task: Seq2Seq, tokenizer: Any) -> None:
    sample = task.encode({"prompt": "123456789", "response": "12"})
    assert sample is not None
    short = task.truncate(sample, 4)
    assert tokenizer.decode(short["input_ids"]) == "123<eos>" and tokenizer.decode(short["labels"]) == "12<eos>"


def test_plain_text_is_refused(task: Seq2Seq) -> None:
    with pytest.raises(UserError, match="the data has the columns text"):
        task.needed_columns(["text"])

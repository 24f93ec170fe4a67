"""causal-lm: what is learned, how samples become a batch, and that the loss is the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from trainwright.errors import UserError
from trainwright.job.schema import Job
from trainwright.train.data.problems import RowError
from trainwright.train.tasks.causal_lm import CausalLM

MakeJob = Callable[..., Job]


def _arrays(sample: dict[str, list[int]] | None) -> dict[str, np.ndarray]:
    assert sample is not None
    return {name: np.array(tokens, dtype=np.int32) for name, tokens in sample.items()}


def _shown(sample: dict[str, list[int]] | None, tokenizer: Any) -> tuple[str, str]:
    assert sample is not None
    learned = [label for label in sample["labels"] if label != -100]
    assert all(label in (-100, token) for token, label in zip(sample["input_ids"], sample["labels"], strict=True))
    return tokenizer.decode(sample["input_ids"]), tokenizer.decode(learned)


@pytest.mark.parametrize(
    ("row", "whole", "learned"),
    [
        ({"prompt": "Hi ", "response": "there"}, "<bos>Hi \nthere<eos>", "there<eos>"),
        ({"question": "1+1=", "answer": "2"}, "<bos>1+1=\n2<eos>", "2<eos>"),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "<bos>Add.\n\n1 2\n3<eos>", "3<eos>"),
        ({"text": "All of it."}, "<bos>All of it.<eos>", "All of it.<eos>"),
    ],
)
def test_the_answer_and_its_end_are_learned(
    row: dict[str, object], whole: str, learned: str, make_job: MakeJob, tokenizer: Any
) -> None:
    task = CausalLM(make_job(), tokenizer)
    sample = task.encode(row)
    assert _shown(sample, tokenizer) == (whole, learned)
    assert sample is not None
    assert task.targets(sample) == sum(label != -100 for label in sample["labels"])


def test_loss_on_all_learns_everything_but_the_first_token(make_job: MakeJob, tokenizer: Any) -> None:
    task = CausalLM(make_job(data={"loss_on": "all"}), tokenizer)
    sample = task.encode({"prompt": "Hi ", "response": "there"})
    assert _shown(sample, tokenizer)[1] == "Hi \nthere<eos>"


def test_no_token_spans_the_border_of_prompt_and_response(make_job: MakeJob, tokenizer: Any) -> None:
    """`France` is one token, also merged with the blank before it; half a word as a prompt is what a user may send."""
    assert len(tokenizer(" France", add_special_tokens=False)["input_ids"]) == 1
    sample = CausalLM(make_job(data={"template": "none"}), tokenizer).encode({"prompt": "in Fra", "response": "nce"})
    prompt_ids = tokenizer("in Fra")["input_ids"]
    assert sample is not None and sample["input_ids"][: len(prompt_ids)] == prompt_ids


@pytest.mark.parametrize("row", [{"prompt": "p", "response": ""}, {"text": ""}, {"messages": []}])
def test_rows_with_nothing_to_learn_give_none(row: dict[str, object], make_job: MakeJob, tokenizer: Any) -> None:
    assert CausalLM(make_job(), tokenizer).encode(row) is None


def test_many_rows_are_encoded_as_each_by_itself(make_job: MakeJob, tokenizer: Any) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": "a", "response": "b"},
        {"prompt": "a", "response": ""},
        {"prompt": "a", "response": 3},
        {"prompt": "longer prompt", "response": "longer answer"},
    ]
    task = CausalLM(make_job(), tokenizer)
    together = task.encode_many(rows)
    assert together[0] == task.encode(rows[0]) and together[3] == task.encode(rows[3]) and together[1] is None
    assert isinstance(together[2], RowError)
    with pytest.raises(RowError, match="column `response`: expected text, found int"):
        task.encode(rows[2])


def test_bos_is_there_only_if_the_tokenizer_puts_it(make_job: MakeJob, tokenizer: Any) -> None:
    """gpt2 has a bos token and never begins a text with it: what is trained must be what `tokenizer(prompt)` gives."""
    backend = tokenizer.backend_tokenizer
    backend.post_processor = None
    bare = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    sample = CausalLM(make_job(), bare).encode({"prompt": "Hi ", "response": "there"})
    assert _shown(sample, bare)[0] == "Hi \nthere<eos>"


def test_a_tokenizer_without_an_end_is_refused(make_job: MakeJob, tokenizer: Any) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>")
    with pytest.raises(UserError, match="eos_token"):
        CausalLM(make_job(), bare)


def test_a_batch_is_padded_to_its_own_longest(make_job: MakeJob, tokenizer: Any) -> None:
    task = CausalLM(make_job(), tokenizer)
    short, long = (_arrays(task.encode({"text": text})) for text in ("ab", "abcdef"))
    batch = task.collate([short, long])
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert {(tuple(t.shape), t.dtype) for t in batch.values()} == {((2, len(long["input_ids"])), torch.int64)}
    n = len(short["input_ids"])
    assert batch["input_ids"][0].tolist() == short["input_ids"].tolist() + [tokenizer.pad_token_id] * 4
    assert batch["attention_mask"].tolist() == [[1] * n + [0] * 4, [1] * (n + 4)]
    assert (batch["labels"][0, n:] == -100).all()
    assert tuple(task.collate([short])["input_ids"].shape) == (1, n)


def _llama() -> Any:
    torch.manual_seed(0)
    dimensions = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=320, initializer_range=0.3, **dimensions)
    return AutoModelForCausalLM.from_config(config).eval()


def test_loss_sum_is_the_models_own_mean_times_the_targets(make_job: MakeJob, tokenizer: Any) -> None:
    task = CausalLM(make_job(), tokenizer)
    rows = [("question", "answer"), ("a much longer question 12", "Paris is in France."), ("q", "1")]
    samples = [task.encode({"prompt": prompt, "response": response}) for prompt, response in rows]
    batch = task.collate([_arrays(sample) for sample in samples])
    model = _llama()
    loss = task.loss_sum(model, batch)
    targets = sum(task.targets(sample) for sample in samples if sample is not None)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(model(**batch).loss.item() * targets, rel=1e-5)


def test_gradients_of_loss_sum_are_those_of_the_models_own(make_job: MakeJob, tokenizer: Any) -> None:
    task = CausalLM(make_job(), tokenizer)
    sample = task.encode({"prompt": "question", "response": "answer 12"})
    assert sample is not None
    batch, ours, theirs = task.collate([_arrays(sample)]), _llama(), _llama()
    (task.loss_sum(ours, batch) / task.targets(sample)).backward()
    theirs(**batch).loss.backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)


def test_a_batch_with_no_target_has_no_loss_and_no_gradient(make_job: MakeJob, tokenizer: Any) -> None:
    model = _llama()
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "labels": torch.full((1, 4), -100)}
    loss = CausalLM(make_job(), tokenizer).loss_sum(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert all((parameter.grad == 0).all() for parameter in model.parameters())

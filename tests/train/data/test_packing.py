"""Packed documents never see each other, and packs hold every document once (issue 2: packing with no leakage)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from trainwright.errors import UserError
from trainwright.job.schema import Job
from trainwright.train.data.leakage import assert_no_leakage
from trainwright.train.data.packing import IGNORED, join_documents, pack
from trainwright.train.data.tokenizer import train_tokenizer
from trainwright.train.tasks.causal_lm import CausalLM

VOCABULARY = 300
SMALL = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
HIDDEN = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ARCHITECTURES = {
    "llama": HIDDEN | {"num_key_value_heads": 2},
    "qwen2": HIDDEN | {"num_key_value_heads": 2},
    # A window shorter than the documents: mistral masks by position inside each document.
    "mistral": HIDDEN | {"num_key_value_heads": 2, "sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


def _model(architecture: str, attention: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **SMALL | ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.config.use_cache = False
    return model.eval()


@pytest.fixture(scope="module")
def task() -> CausalLM:
    scratch = {"architecture": "llama", "dimensions": {}}
    job = Job.model_validate({"name": "t", "model": {"from_scratch": scratch, "tokenizer": {"vocab_size": VOCABULARY}}})
    return CausalLM(job, train_tokenizer(["some text"], VOCABULARY, ends_with_eos=False))


def _document(seed: int, length: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(4, VOCABULARY, length).astype(np.int32)
    return {"input_ids": ids, "labels": np.where(np.arange(length) == 0, IGNORED, ids).astype(np.int32)}


@torch.no_grad()
def _logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_leakage(architecture: str, attention: str, task: CausalLM) -> None:
    """Each document's logits in a pack are those it has alone, and no bit of them follows another document."""
    model = _model(architecture, attention)
    first, second, third, short = _document(1, 9), _document(2, 7), _document(3, 1), _document(4, 5)
    packs = [join_documents([first, second, third]), join_documents([short, second])]
    packed = _logits(model, task.collate(packs))
    for row, start, document in ((0, 0, first), (0, 9, second), (0, 16, third), (1, 0, short), (1, 5, second)):
        alone = _logits(model, task.collate([document]))[0]
        assert (packed[row, start : start + len(alone)] - alone).abs().max() <= 1e-5

    changed = _logits(model, task.collate([join_documents([_document(99, 9), second, third]), packs[1]]))
    assert not torch.equal(changed[0, :9], packed[0, :9])
    assert torch.equal(changed[0, 9:17], packed[0, 9:17])
    assert torch.equal(changed[1], packed[1])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_of_packs_is_the_loss_of_their_documents(architecture: str, task: CausalLM) -> None:
    model = _model(architecture, "sdpa")
    documents = [_document(seed, length) for seed, length in enumerate((9, 7, 5, 12, 3))]
    packs = [join_documents(documents[:2]), join_documents(documents[2:])]
    together = task.loss_sum(model, task.collate(packs))
    alone = sum(task.loss_sum(model, task.collate([document])) for document in documents)
    assert together.item() == pytest.approx(alone.item(), rel=1e-5)


def test_flash_attention_gets_one_row_with_the_same_loss(task: CausalLM) -> None:
    """transformers' flash attention reads packed positions in a batch of one row only."""
    scratch = {"architecture": "llama", "dimensions": {}}
    model = {
        "from_scratch": scratch,
        "tokenizer": {"vocab_size": VOCABULARY},
        "attn_implementation": "flash_attention_2",
    }
    flash = CausalLM(Job.model_validate({"name": "t", "model": model}), task._tokenizer)
    packs = [join_documents([_document(1, 9), _document(2, 7)]), join_documents([_document(3, 4)])]
    batch = flash.collate(packs)
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(1, 20)}
    sdpa = _model("llama", "sdpa")
    assert flash.loss_sum(sdpa, batch).item() == pytest.approx(
        task.loss_sum(sdpa, task.collate(packs)).item(), rel=1e-5
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_check_passes_where_documents_are_apart(architecture: str, task: CausalLM) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture], vocab_size=VOCABULARY)
    model = AutoModelForCausalLM.from_config(config).train()
    assert_no_leakage(model, task, "cpu")
    assert model.training, "the check leaves the model as it found it"


LEAKING = {
    "opt": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "ffn_dim": 64,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
"""Architectures of transformers that accept position ids and let packed documents see each other all the same."""


@pytest.mark.parametrize("architecture", LEAKING)
def test_check_finds_models_that_leak(architecture: str, task: CausalLM) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, vocab_size=VOCABULARY, **LEAKING[architecture])
    with pytest.raises(UserError, match=f"of type `{architecture}`, packed documents see each other") as caught:
        assert_no_leakage(AutoModelForCausalLM.from_config(config), task, "cpu")
    assert "data.packing=false" in caught.value.hints


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_packs_hold_each_document_once_and_overflow_nowhere(lengths: list[int]) -> None:
    documents, offsets = pack(np.array(lengths), 50)
    assert sorted(documents.tolist()) == list(range(len(lengths)))
    for start, end in itertools.pairwise(offsets):
        assert 0 < sum(lengths[i] for i in documents[start:end]) <= 50
    again = pack(np.array(lengths), 50)
    assert (documents.tolist(), offsets.tolist()) == (again[0].tolist(), again[1].tolist())


def test_packing_wastes_little() -> None:
    lengths = np.random.default_rng(0).integers(20, 400, 3000)
    _, offsets = pack(lengths, 1024)
    assert lengths.sum() / ((len(offsets) - 1) * 1024) > 0.97


def test_nothing_is_learned_across_the_border() -> None:
    joined = join_documents([{name: tokens.copy() for name, tokens in _document(s, 4).items()} for s in (1, 2)])
    assert joined["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert (joined["labels"] == IGNORED).tolist() == [True, False, False, False] * 2

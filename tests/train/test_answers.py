"""`python -m trainwright.train.answer_prompts`: the answers of a model to a file of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trainwright.train.answer_prompts import BATCH_SIZE, main
from trainwright.train.data.tokenizer import train_tokenizer

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "the", "dog", "run", "over", "the", "hill"]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = train_tokenizer([" ".join(WORDS)] * 20, 300, ends_with_eos=False)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.long
def test_a_prompt_is_answered_alike_alone_and_in_a_batch_of_other_lengths(model_dir: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": " ".join(WORDS[: 1 + number % len(WORDS)]) + f" {number}", "number": number}
        for number in range(BATCH_SIZE + 7)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(model_dir), str(tmp_path / "prompts.jsonl"), str(tmp_path / "answers.jsonl")]) == 0
    answered = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]

    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    for row, found in zip(rows, answered, strict=True):
        prompt = tokenizer(str(row["prompt"]), return_tensors="pt", return_token_type_ids=False)
        tokens = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert found == row | {"answer": tokenizer.decode(tokens, skip_special_tokens=True).strip()}


def test_what_is_missing_is_named(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n{"question": "who?"}\n')
    assert main([str(model_dir), str(prompts), str(answers)]) == 2
    assert "row 2 has no prompt" in capsys.readouterr().err
    prompts.write_text('{"prompt": "the cat"}\n')
    (model_dir / "model.safetensors").unlink()
    assert main([str(model_dir), str(prompts), str(answers)]) == 4
    assert "no causal language model can be loaded" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere"), str(prompts), str(answers)]) == 4
    assert main([str(model_dir)]) == 2

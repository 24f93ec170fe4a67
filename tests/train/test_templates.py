"""Real runs of prompts and responses: in a chat template or without one, and as a run was begun."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from peft import AutoPeftModelForCausalLM
from real_runs import CompletedRun, RunTrain, StartTrain, WriteJob
from transformers import AutoTokenizer

from trainwright.train.answer_prompts import main

CHAT = (
    "{% for message in messages %}{{ '[' + message.role + ']' + message.content + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.fixture(scope="module")
def instruct_model(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model with a chat template."""
    folder = shutil.copytree(base_model, tmp_path_factory.mktemp("instruct") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def begun(
    instruct_model: Path, tmp_path_factory: pytest.TempPathFactory, write_job: WriteJob, start_train: StartTrain
) -> tuple[Path, CompletedRun]:
    """A LoRA run with nothing between prompt and response and at 2e-5, as versions without templates had it, stopped.

    The job file says neither.
    """
    folder = tmp_path_factory.mktemp("templates")
    train = {"global_batch_size": 4, "num_train_epochs": 1.0}
    job = write_job(folder, model={"name": str(instruct_model)}, method={"type": "lora"})
    written = json.loads(job.read_text())
    job.write_text(json.dumps(written | {"train": train}))
    running = start_train(job, "data.template=none", "train.learning_rate=2e-5")
    running.wait_for_step(3)
    running.process.send_signal(signal.SIGTERM)
    run = running.finish()
    assert run.exit_code == 75, run.stderr
    return job, run


def test_harm_07_a_run_goes_on_with_the_tokens_and_the_rate_that_it_had(
    begun: tuple[Path, CompletedRun], run_train: RunTrain
) -> None:
    """Never silently with others: it is refused in words, and then goes on as the words say."""
    job, _ = begun
    refused = run_train(job)
    assert refused.exit_code == 2
    assert "data.template: none -> chat" in refused.stderr
    assert "data.template=none" in refused.stderr
    run = run_train(job, "data.template=none")
    assert run.exit_code == 0, run.stderr
    assert "Contract: exact" in run.stderr
    assert "Learning rate: 2e-05, as this run has had so far (0.0002 would be usual for a new one)" in run.stderr
    assert json.loads((run.folder / "plan.json").read_text())["learning_rate"] == 2e-5
    assert max(record["learning_rate"] for record in run.steps().values()) == 2e-5
    assert AutoTokenizer.from_pretrained(run.folder / "final_model").chat_template is None


def test_harm_07_a_new_run_is_in_the_chat_template_and_at_the_rate_of_its_method(
    begun: tuple[Path, CompletedRun], run_train: RunTrain, tmp_path: Path
) -> None:
    """What is chosen is printed before the first step, with its reason, and stored; the model is asked the same way."""
    job, _ = begun
    run = run_train(job, "name=new", "train.max_steps=2")
    assert run.exit_code == 0, run.stderr
    before = run.stderr.partition("step 1/")[0]
    assert "data.template = chat  (the tokenizer has a chat template)" in before
    assert "train.learning_rate = 0.0002  (usual for lora" in before
    assert "[assistant][[" in before, "the first example, what is learned marked"
    prepared = json.loads((run.folder / "prepared.json").read_text())
    assert prepared["template"] == {"value": "chat", "reason": "the tokenizer has a chat template"}
    assert json.loads((run.folder / "resolved.json").read_text())["train"]["learning_rate"] == 2e-4
    final = run.folder / "final_model"
    assert AutoTokenizer.from_pretrained(final).chat_template == CHAT
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "How many?"}\n')
    assert main([str(final), str(prompts), str(answers)]) == 0
    model, tokenizer = AutoPeftModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    asked = tokenizer("[user]How many?<eos>[assistant]", add_special_tokens=False, return_tensors="pt")
    tokens = model.generate(input_ids=asked["input_ids"], max_new_tokens=64, do_sample=False)
    said = tokenizer.decode(tokens[0, asked["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert json.loads(answers.read_text())["answer"] == said

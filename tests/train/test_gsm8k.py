"""A base from scratch, LoRA on it, then full training of the result, on real questions (issue 2, done when 2)."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_runs import TINY_LLAMA, CompletedRun, RunTrain, WriteJob

pytestmark = pytest.mark.long
GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl"


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, write_job: WriteJob, run_train: RunTrain) -> list[CompletedRun]:
    """The three runs; each takes the final model of the one before it, and all hold out the same tenth."""
    folder = tmp_path_factory.mktemp("gsm8k")
    scratch = {**TINY_LLAMA, "dimensions": TINY_LLAMA["dimensions"] | {"max_position_embeddings": 256}}
    common = {
        "data": {"path": str(GSM8K), "max_length": 192, "eval_split": 0.1},
        "train": {"global_batch_size": 12, "micro_batch_size": 6, "num_train_epochs": 2.0, "learning_rate": 3e-3},
        "eval": {"every": "0.5 epochs"},
        "checkpoint": {"every": "1 epoch"},
    }
    stages: list[CompletedRun] = []

    def run(name: str, model: dict[str, object], *arguments: str) -> Path:
        job = write_job(folder / name, name=name, model=model, **common)
        stages.append(run_train(job, *arguments))
        assert stages[-1].exit_code == 0, stages[-1].stderr
        return stages[-1].folder / "final_model"

    base = run("base", {"from_scratch": scratch, "tokenizer": {"vocab_size": 1024}}, "resources.ranks=2")
    adapted = run("lora", {"name": str(base)}, "method.type=lora", "method.merge=true", "train.learning_rate=1e-2")
    run("full", {"name": str(adapted / "merged")}, "train.learning_rate=1e-3")
    return stages


def test_the_loss_falls_in_every_stage_and_from_each_to_the_next(stages: list[CompletedRun]) -> None:
    """On the same held-out questions: within each run, and from base to LoRA to full."""
    ends = []
    for run in stages:
        evals = run.steps("eval")
        assert evals[max(evals)]["loss"] < evals[min(evals)]["loss"]
        ends.append(evals[max(evals)]["loss"])
    assert ends == sorted(ends, reverse=True)
    assert stages[0].losses[-1] < stages[0].losses[0] - 1


def test_each_result_loads_in_one_line_and_writes(stages: list[CompletedRun]) -> None:
    """Plain transformers for the base and the full model, plain peft for the adapter; each answers in tokens."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaders = (AutoModelForCausalLM, AutoPeftModelForCausalLM, AutoModelForCausalLM)
    for run, loader in zip(stages, loaders, strict=True):
        final = run.folder / "final_model"
        model, tokenizer = loader.from_pretrained(final), AutoTokenizer.from_pretrained(final)
        question = tokenizer("Natalia sold clips to 48 of her friends.", return_tensors="pt")
        written = model.generate(**question, max_new_tokens=5, do_sample=False)
        assert written.shape[1] > question["input_ids"].shape[1]

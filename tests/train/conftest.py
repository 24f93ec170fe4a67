"""Real runs of the installed `trainwright train`: a small data set, a job file, and the command as a subprocess."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from disturbed_runs import TINY_GPT2, WriteDropoutJob, finish
from real_runs import SAMPLES, TINY_LLAMA, CompletedRun, RunningTrain, RunTrain, StartTrain, WriteJob


@pytest.fixture(scope="session")
def question_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions and answers of different lengths, from a seed, as JSON Lines."""
    draw = random.Random(7)
    names = ["the lamp", "a red door", "node", "the quiet old river", "port"]
    rows = []
    for index in range(SAMPLES):
        a, b, name = draw.randrange(100), draw.randrange(100), draw.choice(names)
        question = " ".join([f"Question {index}: {name} {a} meets {name} {b}."] * draw.randint(1, 2)) + " How many?"
        answer = draw.choice([f"{a + b}.", f"There are {a + b} of {name}.", f"{a} and {b} make {a + b}, so {a + b}."])
        rows.append({"question": question, "answer": answer})
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of tokenized data for all runs."""
    return tmp_path_factory.mktemp("token-cache")


@pytest.fixture(scope="session")
def write_job(question_file: Path, token_cache: Path) -> WriteJob:
    """Write `<folder>/job.yaml`: a tiny llama from scratch on the questions, fp32 on the CPU; sections are merged in.

    `write_job(folder, train={"max_steps": 5}, method={"type": "lora"})`; a run of it lies in `<folder>/runs/<name>`.
    """

    def write(folder: Path, **sections: Any) -> Path:
        job: dict[str, Any] = {
            "name": "run",
            "output_dir": str(folder / "runs"),
            "model": {"from_scratch": TINY_LLAMA, "tokenizer": {"vocab_size": 400}},
            "data": {"path": str(question_file), "max_length": 96, "cache_dir": str(token_cache)},
            "train": {"global_batch_size": 8, "learning_rate": 1e-3, "num_train_epochs": 1.0},
            "checkpoint": {"every": "1000 steps"},
            # A busy machine makes one rank slower than the other; runs that are compared bit by bit keep their parts.
            "resources": {"device": "cpu", "precision": "fp32", "balance": "off"},
            "tracking": [],
        }
        for key, value in sections.items():
            merge = isinstance(value, dict) and isinstance(job.get(key), dict) and key != "model"
            job[key] = job[key] | value if merge else value
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "job.yaml"
        path.write_text(json.dumps(job, indent=1))  # JSON is YAML 1.2
        return path

    return write


@pytest.fixture(scope="session")
def start_train() -> StartTrain:
    """Start `trainwright train JOB ARGUMENTS...` and return at once; `name=...` among the arguments is understood."""

    def start(job: Path, *arguments: str) -> RunningTrain:
        named = [argument.removeprefix("name=") for argument in arguments if argument.startswith("name=")]
        written = json.loads(job.read_text())
        process = subprocess.Popen(
            [Path(sys.executable).with_name("trainwright"), "train", job, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=job.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        return RunningTrain(process, Path(written["output_dir"]) / (named or [written["name"]])[-1])

    return start


@pytest.fixture(scope="session")
def run_train(start_train: StartTrain) -> RunTrain:
    """Run `trainwright train JOB ARGUMENTS...` to its end, whatever its exit code."""

    def run(job: Path, *arguments: str) -> CompletedRun:
        return start_train(job, *arguments).finish()

    return run


@pytest.fixture(scope="session")
def base_model(question_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained llama with its tokenizer, as transformers saves them, and in `adapter/` a LoRA adapter of peft's."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainwright.train.data.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("base-model")
    tokenizer = train_tokenizer(question_file.read_text().splitlines(), 400, ends_with_eos=False)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(11)
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **special, **TINY_LLAMA["dimensions"]))
    model.save_pretrained(folder)
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model, adapter).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture(scope="session")
def dropout_job(write_job: WriteJob) -> WriteDropoutJob:
    """Write `<folder>/job.yaml` and return the folder: two ranks under DDP, 120 steps, and dropout.

    The faulty task lies beside it.
    """

    def write(folder: Path, **sections: Any) -> Path:
        shared = {
            "model": {"from_scratch": TINY_GPT2, "tokenizer": {"vocab_size": 400}},
            "train": {"global_batch_size": 8, "micro_batch_size": 4, "num_train_epochs": 10.0},
            "resources": {"ranks": 2, "strategy": "ddp"},
        }
        write_job(folder, **{**shared, **sections})
        shutil.copy(Path(__file__).with_name("faulty_task.py"), folder)
        return folder

    return write


@pytest.fixture(scope="session")
def undisturbed(dropout_job: WriteDropoutJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the dropout job, trained in one go."""
    folder = dropout_job(tmp_path_factory.mktemp("undisturbed"))
    finish(folder, folder / "runs" / "run")
    return folder / "runs" / "run"

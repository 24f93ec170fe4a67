"""Train the jobs of finished run folders again, with transformers' own Trainer, and print each step's loss as JSON.

`python hf_trainer.py RUN_DIR...` reads a run's job and token cache, and nothing else of it: the model, the adapter,
the optimizer, the schedule, clipping and accumulation are those of transformers and peft.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from trainwright.train.data.dataset import TokenDataset
from trainwright.train.data.order import epoch_order


class InOrder(Dataset):
    """The samples of all epochs in a row, in the order in which the run visited them."""

    def __init__(self, samples: TokenDataset, seed: int, epochs: int) -> None:
        self._samples = samples
        self._order = [int(i) for epoch in range(epochs) for i in epoch_order(seed, epoch, len(samples))]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {name: stream.tolist() for name, stream in self._samples[self._order[index]].items()}


class SequentialTrainer(Trainer):
    """The Trainer, without its shuffling."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def losses_of(run_dir: Path) -> list[float]:
    job = json.loads((run_dir / "resolved.json").read_text())
    prepared = json.loads((run_dir / "prepared.json").read_text())
    plan = json.loads((run_dir / "plan.json").read_text())
    train, layout = job["train"], plan["layout"]
    model = AutoModelForCausalLM.from_pretrained(job["model"]["name"], dtype=torch.float32)
    if job["method"]["adapter"] is not None:
        model = PeftModel.from_pretrained(model, job["method"]["adapter"], is_trainable=True)
    tokenizer = AutoTokenizer.from_pretrained(job["model"]["name"])
    samples = TokenDataset(prepared["train"]["cache"])
    assert len(samples) % train["global_batch_size"] == 0, "a short batch would shift those after it"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=layout["micro_batch_size"],
            gradient_accumulation_steps=layout["gradient_accumulation_steps"],
            num_train_epochs=1,
            learning_rate=train["learning_rate"],
            lr_scheduler_type=train["lr_scheduler_type"],
            warmup_steps=int(train["warmup_steps"]),
            weight_decay=train["weight_decay"],
            adam_beta2=train["adam_beta2"],
            max_grad_norm=train["max_grad_norm"],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = SequentialTrainer(
            model=model,
            args=arguments,
            train_dataset=InOrder(samples, train["seed"], int(train["num_train_epochs"])),
            data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
        )
        trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


if __name__ == "__main__":
    print(json.dumps([losses_of(Path(run_dir)) for run_dir in sys.argv[1:]]))

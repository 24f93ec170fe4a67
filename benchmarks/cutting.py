"""What a step costs where samples of like length come together, beside what it cost before, in pairs in one process.

    python benchmarks/cutting.py --out benchmarks/results/cutting.json [--gsm8k FILE] [--steps 6]

Each kind of data is trained by the workers' own step loop: a small llama from scratch on the CPU, random tokens, real
lengths. `before`: micro-batches in the order of the data, with an attention mask; `now`: by length, without one. They
take turns (before, now, now, before) on the same steps. CPU seconds are those of the process, tokens those of samples:
padding is no token. `share` is that of tokens in all that is computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainwright.job.batch_schedule import Batch, Position
from trainwright.job.schema import Job
from trainwright.train.balance import Balance
from trainwright.train.cutting.split import Split
from trainwright.train.data.tokenizer import train_tokenizer
from trainwright.train.feeding import Feed
from trainwright.train.loop import StepLoop
from trainwright.train.ranks import Ranks
from trainwright.train.step_timer import Sections
from trainwright.train.strategies.replicated import Replicated
from trainwright.train.tasks.causal_lm import CausalLM

CPU = torch.device("cpu")
GLOBAL_BATCH, MICRO_BATCH = 64, 8
VOCABULARY = 2000
SAMPLE = Path(__file__).parents[1] / "tests" / "data" / "gsm8k_sample.jsonl"
SIZES = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3, "num_attention_heads": 4}
WAYS = ("before", "now")


class Drawn:
    """Random tokens in samples of given lengths, with the members of a TokenDataset that the step loop asks for."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths, self.targets = lengths, lengths - 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        drawn = np.random.default_rng(index).integers(3, VOCABULARY, self.lengths[index], dtype=np.int32)
        return {"input_ids": drawn, "labels": drawn}


class Counting(CausalLM):
    """causal-lm that counts what is computed, padding included."""

    computed = 0

    def collate(self, samples: Any) -> dict[str, torch.Tensor]:
        """Collate and count."""
        batch = super().collate(samples)
        self.computed += batch["input_ids"].numel()
        return batch


def lengths_of(gsm8k: Path, samples: int) -> dict[str, np.ndarray]:
    """Return the lengths of three kinds of data: questions with answers, chats cut off at 512, and all of 192."""
    rows = [json.loads(line) for line in gsm8k.read_text().splitlines()]
    texts = [f"{row['question']}{row['answer']}" for row in rows]
    tokenizer = train_tokenizer(texts, 8000, ends_with_eos=False)
    questions = np.array([len(ids) for ids in tokenizer(texts)["input_ids"]])
    draw = np.random.default_rng(0)
    return {
        "gsm8k": np.resize(draw.permutation(questions), samples).astype(np.int32),
        "chat": np.clip(draw.lognormal(4.8, 1.1, samples), 8, 512).astype(np.int32),
        "full": np.full(samples, 192, dtype=np.int32),
    }


def step_loop(lengths: np.ndarray) -> tuple[StepLoop, Counting]:
    """Return the workers' loop over such data, alone on the CPU in fp32."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, **SIZES)).train()
    job = Job.model_validate({"name": "cutting", "model": {"name": "none"}, "data": {"path": "none"}})
    ranks = Ranks(0, 1, CPU)
    task = Counting(job, train_tokenizer(["a text of few words"], 300, ends_with_eos=False))
    rest: dict[str, Any] = dict.fromkeys(StepLoop.__dataclass_fields__)
    own = {
        "job": job,
        "assignment": SimpleNamespace(rank=0, precision="fp32"),
        "ranks": ranks,
        "task": task,
        "strategy": Replicated(model, job.train, device=CPU, name="single", fp16=False),
        "train_data": Drawn(lengths),
        "sections": Sections(CPU),
    }
    return StepLoop(**rest | own), task


def measure(lengths: np.ndarray, steps: int, pairs: int) -> dict[str, Any]:
    """Return CPU seconds a thousand tokens by way, all of them, and their ratio."""
    loop, task = step_loop(lengths)
    feed = Feed(loop.train_data, task, CPU)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    shares: dict[str, float] = {}
    losses: dict[str, list[float]] = {}

    def run(way: str, count: int) -> None:
        split = Split((1,), (MICRO_BATCH,), in_order=way == "before")
        loop.balance = Balance(split, loop.ranks, None, settled=True)
        task.use_config({"model_type": "llama" if way == "now" else "any that needs a mask"})
        task.computed, began_s, found = 0, time.process_time(), []
        for step in range(count):
            samples = np.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
            targets = int(loop.train_data.targets[samples].sum())
            batch = Batch(0, 0, GLOBAL_BATCH, Position(step, 0, 0, 0), Position(step + 1, 0, 0, 0))
            found.append(loop._forward_backward(batch, samples, targets, feed) / targets)
            loop.strategy.step(0.0, 1.0)  # nothing is learned, so that all turns compute the same
        tokens = int(lengths[: count * GLOBAL_BATCH].sum())
        seconds[way].append(1000 * (time.process_time() - began_s) / tokens)
        shares[way], losses[way] = tokens / task.computed, found

    for way in WAYS:
        run(way, 1)
    for kept in seconds.values():
        kept.clear()
    for _ in range(pairs):
        for way in ("before", "now", "now", "before"):
            run(way, steps)
    feed.close()
    apart = max(abs(a - b) for a, b in zip(losses["before"], losses["now"], strict=True))
    assert apart < 1e-5, f"the losses differ by {apart}"
    usual = {way: statistics.median(seconds[way]) for way in WAYS}
    return {
        "share": {way: round(share, 3) for way, share in shares.items()},
        "cpu_s_per_1000_tokens": {way: [round(value, 4) for value in seconds[way]] for way in WAYS},
        "times_as_fast": round(usual["before"] / usual["now"], 3),
        "largest_difference_of_a_loss": apart,
    }


def main() -> None:
    """Measure all kinds of data and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, default=SAMPLE, help="rows with question and answer, as JSON Lines")
    parser.add_argument("--steps", type=int, default=3, help="of 64 samples, in each turn")
    parser.add_argument("--pairs", type=int, default=2, help="rounds of before, now, now, before")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kinds = lengths_of(given.gsm8k, given.steps * GLOBAL_BATCH)
    results = {
        "torch": torch.__version__,
        "global_batch": GLOBAL_BATCH,
        "micro_batch": MICRO_BATCH,
        "steps": given.steps,
        "kinds": {name: measure(lengths, given.steps, given.pairs) for name, lengths in kinds.items()},
    }
    given.out.write_text(json.dumps(results, indent=1) + "\n")
    for name, found in results["kinds"].items():
        print(f"{name}: {found['times_as_fast']} times as fast; tokens in all that is computed {found['share']}")


if __name__ == "__main__":
    main()

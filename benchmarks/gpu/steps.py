"""The process of one rank: measures the configurations that it is told on stdin, with the workers' own code.

    echo "SmolLM2-135M full b8 s1024" | RANK=0 WORLD_SIZE=1 python benchmarks/gpu/steps.py cuda MEETING_FILE

The line on stdin is the name of a configuration, the line on stdout (of rank 0) its figures as JSON. All of a run
is the workers' own: how the model is built and handed to the strategy, the step loop, and what it measures; in the
place of a tokenized data set there are random tokens, and weights are random.

The libraries are imported before the line is read and the device opened after it, so that a process can be made ready
while another measures. It measures one configuration: addresses that an earlier one gave back would be used again in
another order, and of equal free blocks the allocator takes the lowest.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import through_host
import torch
import torch.distributed as dist
import transformers
from configurations import Configuration, configurations
from torch import nn

from trainwright.errors import UserError
from trainwright.estimate.trace.model import without_initial_values
from trainwright.job.course import Course, Position
from trainwright.job.learning_rate import LearningRate
from trainwright.job.schema import Job
from trainwright.runs.folder import RunFolder
from trainwright.train.assignment import Assignment
from trainwright.train.balance import Balance
from trainwright.train.console import Pace
from trainwright.train.data.packing import join_documents
from trainwright.train.feeding import Feed
from trainwright.train.loop import StepLoop
from trainwright.train.measuring import Measuring
from trainwright.train.ranks import Ranks
from trainwright.train.sections import Sections
from trainwright.train.stopping import StopRequest
from trainwright.train.strategies.protocol import Strategy
from trainwright.train.tasks import load_task
from trainwright.train.worker import build_strategy

STEPS = 5
"""Optimizer steps of a configuration; the first is not timed."""


class NoTokenizer:
    """All that a task and a model from scratch ask of a tokenizer where there is no text."""

    pad_token_id, eos_token_id, bos_token_id = 0, 1, None
    all_special_ids: tuple[int, ...] = ()
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": []}

    def __len__(self) -> int:
        return 0


class RandomTokens:
    """One global batch of samples, with the members of a TokenDataset that the step loop asks for."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        samples, length = configuration.global_batch, configuration.length
        shorter = 1 if configuration.batch == "padded" else 0
        self.lengths = np.array([length - shorter * (index % 2) for index in range(samples)], dtype=np.int32)
        first_is_learned = configuration.task == "seq2seq"
        documents = 2 if configuration.batch == "packed" else 1
        self.targets = self.lengths - (0 if first_is_learned else documents)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        length = int(self.lengths[index])
        vocabulary = self._configuration.config["vocab_size"]
        drawn = np.random.default_rng(index).integers(2, vocabulary, length, dtype=np.int32)
        if self._configuration.batch != "packed":
            return {"input_ids": drawn, "labels": drawn.copy()}
        halves = np.split(drawn, [length // 2])
        return join_documents([{"input_ids": half, "labels": half.copy()} for half in halves])


def measure(configuration: Configuration, ranks: Ranks) -> dict[str, Any]:
    """Build the model and do the steps; return the figures of all ranks, or why there are none."""
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        weights = _write_weights(configuration, ranks, Path(folder)) if configuration.method == "qlora" else None
        job = Job.model_validate(configuration.job(STEPS, weights))
        task = load_task(job, NoTokenizer())
        assignment = _assignment(configuration, ranks)
        with contextlib.nullcontext() if weights else without_initial_values():
            strategy, count = build_strategy(
                job, task.auto_model_class(), NoTokenizer(), assignment, ranks, RunFolder(folder)
            )
    if not weights:
        _give_values(strategy.module)
    if configuration.strategy == "fsdp2":
        through_host.reduce_scatter(strategy.module)
    built_s = time.perf_counter() - began_s
    static_bytes = torch.cuda.memory_allocated() if ranks.device.type == "cuda" else None
    loop = _step_loop(job, assignment, ranks, strategy, task, RandomTokens(configuration))
    feed, pace = Feed(loop.train_data, task, ranks.device), Pace()
    try:
        for batch in loop.course.batches(loop.position):
            loop.step(batch, feed, pace)
            loop.position = batch.after
    finally:
        feed.close()
    by_rank = ranks.gather(loop.measuring.figures())
    return {
        "parameters": count.total,
        "trainable": count.trainable,
        "build_s": round(built_s, 2),
        "static_bytes": static_bytes,
        **by_rank[0],
        **{key: _highest(by_rank, key) for key in ("allocated_bytes", "reserved_bytes", "device_bytes")},
        "by_rank": by_rank if len(by_rank) > 1 else None,
    }


def _highest(by_rank: list[dict[str, Any]], key: str) -> int | None:
    known = [figures[key] for figures in by_rank if figures[key] is not None]
    return max(known) if len(known) == len(by_rank) else None


def _assignment(configuration: Configuration, ranks: Ranks) -> Assignment:
    return Assignment(
        rank=ranks.rank,
        local_rank=0,
        world_size=ranks.world_size,
        attempt=1,
        global_batch_size=configuration.global_batch,
        device=ranks.device.type,
        strategy=configuration.strategy,
        precision=configuration.precision,
        micro_batch_size=configuration.micro_batch,
        gradient_accumulation_steps=configuration.accumulation,
        eval_batch_size=configuration.micro_batch,
        gradient_checkpointing=configuration.checkpointing,
        offload="none",
    )


def _step_loop(job: Job, assignment: Assignment, ranks: Ranks, strategy: Strategy, task: Any, data: Any) -> StepLoop:
    course = Course.of(job.train, samples=len(data))
    return StepLoop(
        job=job,
        folder=RunFolder(Path.cwd()),  # nothing is saved
        assignment=assignment,
        ranks=ranks,
        stop=StopRequest(),
        task=task,
        strategy=strategy,
        train_data=data,
        eval_data=None,
        course=course,
        curve=LearningRate.of(job.train, peak=job.train.learning_rate, total_samples=course.total_samples),
        contract={},
        tracking=None,
        measuring=Measuring(ranks.device),
        sections=Sections(ranks.device),
        balance=Balance(assignment.split, ranks, None, settled=True),
        position=Position(),
        best=None,
        eval_due=False,
    )


def _write_weights(configuration: Configuration, ranks: Ranks, folder: Path) -> str:
    """Write random weights, which the workers pack in 4 bits while they load them."""
    config = transformers.AutoConfig.for_model(**configuration.config)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[configuration.precision]
    with ranks.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    del model
    _clean(ranks.device)
    return str(folder)


@torch.no_grad()
def _give_values(model: nn.Module) -> None:
    """Fill what was never initialized, on the device and in place: matrices at random, vectors with ones."""
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if parameter.ndim > 1:
            local.normal_(0.0, 0.02)
        else:
            local.fill_(1.0)


def _clean(device: torch.device) -> None:
    """Give back what the allocator holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _figures_or_reason(configuration: Configuration, ranks: Ranks) -> dict[str, Any]:
    try:
        return measure(configuration, ranks)
    except UserError as error:
        return {"failed": " ".join([error.message, *error.problems])}
    except torch.OutOfMemoryError as error:
        return {"failed": "out of memory", "text": str(error).splitlines()[0]}


@contextlib.contextmanager
def _ranks(device_type: str, meeting_file: str) -> Iterator[Ranks]:
    """All ranks on the first GPU: NCCL refuses that, gloo does not."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Named for each kind of device: to a group that is plain `gloo` torch's mesh of GPUs adds one of NCCL.
        backend = "cpu:gloo,cuda:gloo" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{meeting_file}", rank=rank, world_size=world_size)
    yield Ranks(rank, world_size, device)
    if world_size > 1:
        dist.destroy_process_group()


def main() -> None:
    """Answer the one line on stdin."""
    device_type, meeting_file = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    name = sys.stdin.readline().strip()
    if not name:
        return
    configuration = next(c for c in configurations(device_type) if c.name == name)
    with _ranks(device_type, meeting_file) as ranks:
        row = _figures_or_reason(configuration, ranks)
        if ranks.is_first:
            print(json.dumps(row), file=answers, flush=True)


if __name__ == "__main__":
    main()

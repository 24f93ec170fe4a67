"""The process of one rank: measures one configuration with the workers' own code.

    echo go | RANK=0 WORLD_SIZE=1 python benchmarks/gpu/steps.py cuda MEETING_FILE "SmolLM2-135M full b8 s1024"

The line on stdout (of rank 0) is its figures as JSON. All of a run is the workers' own: how the model is built and
handed to the strategy, the step loop, and what it measures; in the place of a tokenized data set there are random
tokens, and weights are random.

Before it reads the line on stdin it imports the libraries and builds the model on the host (or writes the weights that
are to be packed), so that one process makes itself ready while another measures; the device it opens after that line.
It measures one configuration: addresses that an earlier one gave back would be used again in another order, and of
equal free blocks the allocator takes the lowest.
"""

from __future__ import annotations

import contextlib
import importlib.util
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
from trainwright.job.batch_schedule import BatchSchedule, Position
from trainwright.job.learning_rate import LearningRate
from trainwright.job.schema import Job
from trainwright.runs.folder import RunFolder
from trainwright.train.assignment import Assignment
from trainwright.train.balance import Balance
from trainwright.train.console import StepPace
from trainwright.train.data.packing import join_documents
from trainwright.train.feeding import Feed
from trainwright.train.loop import StepLoop
from trainwright.train.measuring import Measuring
from trainwright.train.models import count_parameters
from trainwright.train.ranks import Ranks
from trainwright.train.step_timer import Sections
from trainwright.train.stopping import StopRequest
from trainwright.train.strategies.protocol import Strategy
from trainwright.train.tasks import load_task
from trainwright.train.tasks.protocol import use_config
from trainwright.train.worker import build_assigned, hand_to_strategy

STEPS = 5
"""Optimizer steps of a configuration; the first is not timed."""


class NoTokenizer:
    """All that a task and a model from scratch ask of a tokenizer where there is no text."""

    pad_token_id, eos_token_id, bos_token_id = 0, 1, None
    bos_token = chat_template = None
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


class Rank:
    """One rank's part of a configuration: what is made ready on the host, and what is measured on the device."""

    def __init__(self, configuration: Configuration, ranks: Ranks, folder: Path) -> None:
        """Build the model, or write the weights that are packed while they are loaded onto the device."""
        self.configuration, self.ranks, self.folder = configuration, ranks, folder
        packed = configuration.method == "qlora"
        self.job = Job.model_validate(configuration.job(STEPS, str(folder) if packed else None))
        self.task = load_task(self.job, NoTokenizer())
        self.assignment = _assignment(configuration, ranks)
        self.model: nn.Module | None = None
        began_s = time.perf_counter()
        with without_initial_values():
            if packed:
                _write_weights(configuration, folder)
            else:
                with _unseen("bitsandbytes"):
                    self.model = self._build()
        self.ready_s = time.perf_counter() - began_s

    def measure(self) -> dict[str, Any]:
        """Take the model to the device and do the steps; return the figures of all ranks."""
        configuration, ranks = self.configuration, self.ranks
        began_s = time.perf_counter()
        if configuration.method != "full" and importlib.util.find_spec("bitsandbytes"):
            importlib.import_module("bitsandbytes")  # as peft does where it is installed
        model = self._build() if self.model is None else self.model
        use_config(self.task, model.config.to_dict())
        count = count_parameters(model)
        strategy = hand_to_strategy(model, self.job, self.assignment, ranks, RunFolder(self.folder))
        if self.model is not None:
            _give_values(strategy.module)
        if configuration.strategy == "fsdp2":
            through_host.reduce_scatter(strategy.module)
        placed_s = time.perf_counter() - began_s
        static_bytes = torch.cuda.memory_allocated() if ranks.device.type == "cuda" else None
        data = RandomTokens(configuration)
        loop = _step_loop(self.job, self.assignment, ranks, strategy, self.task, data)
        feed, pace = Feed(loop.train_data, self.task, ranks.device), StepPace()
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
            "ready_s": round(self.ready_s, 2),
            "placed_s": round(placed_s, 2),
            "static_bytes": static_bytes,
            **by_rank[0],
            **{key: _highest(by_rank, key) for key in ("allocated_bytes", "reserved_bytes", "device_bytes")},
            "by_rank": by_rank if len(by_rank) > 1 else None,
        }

    def _build(self) -> nn.Module:
        auto_class = self.task.auto_model_class()
        return build_assigned(self.job, auto_class, NoTokenizer(), self.assignment, self.ranks)


@contextlib.contextmanager
def _unseen(library: str) -> Iterator[None]:
    """Let a library look as if it were not installed: peft imports bitsandbytes, which opens the device."""
    assert library not in sys.modules
    sys.modules[library] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[library]


def _highest(by_rank: list[dict[str, Any]], key: str) -> int | None:
    known = [figures[key] for figures in by_rank if figures[key] is not None]
    return max(known) if len(known) == len(by_rank) else None


def _assignment(configuration: Configuration, ranks: Ranks) -> Assignment:
    return Assignment(
        rank=ranks.rank,
        local_rank=0,
        world_size=ranks.world_size,
        attempt=1,
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
    course = BatchSchedule.of(job.train, samples=len(data))
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
        balance=Balance(assignment.split(job.train.global_batch_size), ranks, None, settled=True),
        position=Position(),
        best=None,
        eval_due=False,
    )


def _write_weights(configuration: Configuration, folder: Path) -> None:
    """Write weights of a few drawn values, again and again: drawing thousands of millions takes a minute on a host."""
    config = transformers.AutoConfig.for_model(**configuration.config)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[configuration.precision]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    drawn = (0.02 * torch.randn(1_000_003)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for begin in range(0, flat.numel(), drawn.numel()):
                part = flat[begin : begin + drawn.numel()]
                part.copy_(drawn[: part.numel()]) if parameter.ndim > 1 else part.fill_(1.0)
    model.save_pretrained(folder)


@torch.no_grad()
def _give_values(model: nn.Module) -> None:
    """Fill what was never initialized, on the device and in place: matrices at random, vectors with ones."""
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if parameter.ndim > 1:
            local.normal_(0.0, 0.02)
        else:
            local.fill_(1.0)


def _open(ranks: Ranks, meeting_file: str) -> None:
    """Open the device and join the group: all ranks on the first GPU, which NCCL refuses and gloo does not."""
    on_cuda = ranks.device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(ranks.device)
    if ranks.world_size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Named for each kind of device: to a group that is plain `gloo` torch's mesh of GPUs adds one of NCCL.
        backend = "cpu:gloo,cuda:gloo" if on_cuda else "gloo"
        where = f"file://{meeting_file}"
        dist.init_process_group(backend, init_method=where, rank=ranks.rank, world_size=ranks.world_size)


def _figures_or_reason(configuration: Configuration, ranks: Ranks, meeting_file: str) -> dict[str, Any]:
    try:
        with tempfile.TemporaryDirectory() as folder:
            rank = Rank(configuration, ranks, Path(folder))
            if sys.stdin.readline().strip() != "go":
                return {"failed": "it was not asked to go on"}
            _open(ranks, meeting_file)
            return rank.measure()
    except UserError as error:
        return {"failed": " ".join([error.message, *error.problems])}
    except torch.OutOfMemoryError as error:
        return {"failed": "out of memory", "text": str(error).splitlines()[0]}


def main() -> None:
    """Answer with the figures of the configuration that the command line names."""
    device_type, meeting_file, name = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    configuration = next(c for c in configurations(device_type) if c.name == name)
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device)
    row = _figures_or_reason(configuration, ranks, meeting_file)
    if ranks.is_first:
        print(json.dumps(row), file=answers, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

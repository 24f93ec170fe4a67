"""The step of a request on real CPU tensors under the trace's own tracker; a script, as the trace is.

    python real_steps.py REQUESTS.json

prints a list of `{phase: peak bytes, ..., "static": bytes}`. As a rank of `gloo.run_group` it joins the group, and
rank 0 prints. A request with `"workers_code": true` runs the step with the code of trainwright.train itself.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from gloo import joined

from trainwright.estimate.request import Request
from trainwright.estimate.trace.answers import Answers
from trainwright.estimate.trace.batches import make_batch
from trainwright.estimate.trace.distributed import open_mesh
from trainwright.estimate.trace.model import build_config, build_model
from trainwright.estimate.trace.peaks_report import training_records
from trainwright.estimate.trace.run import prepare, run
from trainwright.estimate.trace.tracker import TracePhase, Tracker


def peaks(tracker: Tracker, static_bytes: int) -> dict[str, int]:
    """Return the peak of each phase."""
    total, found = 0, Counter({"static": static_bytes})
    for record in training_records(tracker):
        total += record.size_bytes
        if record.phase.step > 0:
            name = f"{record.phase.name} {record.phase.step}"
            found[name] = max(found[name], total)
    return dict(found)


def real_step(request: Request) -> dict[str, int]:
    """Run the request as the trace does, on real tensors."""
    done = run(request, nullcontext(), mesh=open_mesh(request))
    return peaks(done.tracker, done.static_bytes)


class _Tokenizer:
    """All that a task asks of a tokenizer before it sees text."""

    bos_token_id, eos_token_id, pad_token_id = None, 1, 0
    bos_token = chat_template = None
    all_special_ids: tuple[int, ...] = ()
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": []}


def step_of_the_workers(request: Request) -> dict[str, int]:
    """Run two steps, three under ZeRO, with the workers' strategy, autocast and loss."""
    from trainwright.job.schema import Job
    from trainwright.train.precision import autocast
    from trainwright.train.tasks.causal_lm import CausalLM
    from trainwright.train.tasks.seq2seq import Seq2Seq

    device = torch.device("cpu")
    config = build_config(request)
    answers = Answers(mask_is_full=request.seen_batch == "full", learned_share=1.0)
    tracker = Tracker("cpu", answers, capability=None, vocabulary=None)
    train = {"max_grad_norm": request.max_grad_norm}
    job = Job.model_validate({"name": "step", "model": {"name": "none"}, "train": train})
    task: Any = (Seq2Seq if request.auto_class == "AutoModelForSeq2SeqLM" else CausalLM)(job, _Tokenizer())
    with tracker:
        model = build_model(request, config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        del parameter
        strategy = _strategy(request, model, job)
        gc.collect()
        static_bytes = tracker.live_bytes()
        for step in range(1, 4 if request.strategy.startswith("zero") else 3):
            total = torch.zeros((), dtype=torch.float64)
            for index in range(request.gradient_accumulation_steps):
                tracker.phase = TracePhase("forward", step)
                inputs = make_batch(request, config, request.micro_batch_size, pixels=torch.float32)
                with strategy.micro_step(last=index == request.gradient_accumulation_steps - 1):
                    with autocast(device, request.precision):
                        loss = task.loss_sum(strategy.forward, inputs) * 1.0
                    tracker.phase = TracePhase("backward", step)
                    strategy.backward(loss / 100)
                total += loss.detach().double()
            tracker.phase = TracePhase("optimizer", step)
            strategy.step(1e-4, request.max_grad_norm)
    return peaks(tracker, static_bytes)


def _strategy(request: Request, model: Any, job: Any) -> Any:
    """The workers' own; DeepSpeed gets the file that it gets on GPUs, where it fills one bucket and reduces another."""
    from trainwright.launch.files.deepspeed import engine_config
    from trainwright.plan.layout import Layout
    from trainwright.train.strategies.replicated import Replicated
    from trainwright.train.strategies.zero import Zero

    if not request.strategy.startswith("zero"):
        fp16 = request.precision == "fp16"
        return Replicated(model, job.train, device=torch.device("cpu"), name=request.strategy, fp16=fp16)
    layout = Layout(
        device="cuda",
        visible_devices=None,
        ranks=request.world_size,
        strategy=request.strategy,
        precision=request.precision,
        offload=request.offload,
        global_batch_size=request.world_size * request.micro_batch_size * request.gradient_accumulation_steps,
        micro_batch_size=request.micro_batch_size,
        gradient_accumulation_steps=request.gradient_accumulation_steps,
        eval_batch_size=1,
        gradient_checkpointing=False,
    )
    return Zero(model, job.train, device=torch.device("cpu"), config=engine_config(job, layout))


def main() -> None:
    """Print the peaks of every request in the file."""
    torch.set_num_threads(1)
    prepare(with_adapters=True)
    with joined() if "RANK" in os.environ else nullcontext(0) as rank:
        found = list(map(peaks_of, json.loads(Path(sys.argv[1]).read_text())))
        if rank == 0:
            json.dump(found, sys.stdout)


def peaks_of(data: dict[str, Any]) -> dict[str, int]:
    """Run one request, and leave nothing of it to the next."""
    by_workers = data.pop("workers_code", False)
    request = Request.parse(data)
    found = step_of_the_workers(request) if by_workers else real_step(request)
    gc.collect()
    return found


if __name__ == "__main__":
    main()

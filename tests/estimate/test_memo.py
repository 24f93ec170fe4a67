"""The trace remembers what operators give (estimate/trace/memo.py); that must not change a byte of what it finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tracing import ENVIRONMENT, GPT2, LLAMA, T5, request

MOE = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
LORA = {"method": {"type": "lora", "r": 8, "dropout": 0.1}, "gradient_checkpointing": "non_reentrant"}
CASES: dict[str, dict[str, Any]] = {
    "lora, checkpointed": request(**LORA),
    "packed, accumulated": request(batch="packed", gradient_accumulation_steps=2),
    "experts": request(MOE, recipe="transformers", weights="bf16", autocast=False, batch="full"),
    "adafactor": request(T5, auto_class="AutoModelForSeq2SeqLM", optimizer="adafactor", evaluation_batch_size=4),
    "eager, loop": request(GPT2, attention="eager", optimizer="adamw_loop", max_grad_norm=0.0),
    "fsdp2": request(strategy="fsdp2", world_size=4, batch="full"),
    "fsdp1": request(strategy="fsdp1", world_size=4, batch="full", recipe="transformers", weights="bf16"),
}

BOTH_WAYS = """
import json, sys
from trainwright.estimate.request import Request
from trainwright.estimate.trace.memo import Memo
from trainwright.estimate.trace.run import prepare, trace

prepare(with_adapters=True)
remembering, run = Memo.call, [0]

def running(self, func, args, kwargs):
    run[0] += 1
    return func(*args, **kwargs)

def traced(request):
    tracker = trace(request).tracker  # which goes on as the model is dropped
    numbers = {}  # streams are numbered through a process
    places = [record._replace(stream=numbers.setdefault(record.stream, len(numbers))) for record in tracker.records]
    return places, dict(tracker.parts)

for data in json.loads(sys.stdin.read()):
    request = Request.parse(data)
    Memo.call = remembering
    remembered = traced(request)
    Memo.call = running
    ran = traced(request)
    print(json.dumps([len(ran[0]), remembered[0] == ran[0], remembered[1] == ran[1], run[0]]))
"""


@pytest.mark.long
def test_traces_with_and_without_the_memo_are_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOTH_WAYS],
        input=json.dumps(list(CASES.values())),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))
    for name, (records, same_records, same_parts, _) in found.items():
        assert records > 400, name
        assert same_records and same_parts, name
    assert found["fsdp1"][-1] > 5000, "the second traces did run their operators"

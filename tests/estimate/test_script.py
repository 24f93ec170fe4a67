"""A user's own script traced on a GPU that is not there: the same peaks as the same step asked for as a request."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tracing import ENVIRONMENT, LLAMA, request

from trainwright.errors import ExitCode

pytestmark = pytest.mark.long
GPU = {"capacity_bytes": 24 << 30, "compute_capability": [8, 6], "gpu_name": "NVIDIA GeForce RTX 3090"}
MODEL = f"LlamaConfig(**{ {name: value for name, value in LLAMA.items() if name != 'model_type'} }, use_cache=False)"

LOOP = f"""
import os, sys
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

class Rows(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        row = {{"input_ids": torch.full((128,), 5), "labels": torch.full((128,), 5)}}
        if "--mask" in sys.argv:
            row["attention_mask"] = torch.ones(128, dtype=torch.int64)
        if "--padded" in sys.argv:
            row["attention_mask"][-8:] = 0
        return row

assert torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory == {24 << 30}
print("this GPU:", torch.cuda.get_device_name())
device = torch.device("cuda")
model = AutoModelForCausalLM.from_config({MODEL}, dtype=torch.float32).to(device)
if "--ddp" in sys.argv:
    torch.distributed.init_process_group("nccl")
    model = DistributedDataParallel(model, device_ids=[int(os.environ["LOCAL_RANK"])])
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for batch in DataLoader(Rows(), batch_size=2, shuffle=True, num_workers=2, pin_memory=True):
    batch = {{name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert torch.isfinite(loss), "the loss is not finite"
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
    torch.save(model.state_dict(), "model.pt")
"""

TRAINER = f"""
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_config({MODEL}, dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32.0, target_modules="all-linear", task_type="CAUSAL_LM"))
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=2, bf16=True, gradient_checkpointing=True, optim="adamw_torch_fused",
    save_steps=1, save_total_limit=1, logging_steps=1, report_to="none",
)
rows = [{{"input_ids": [5] * 128, "labels": [5] * 128}}] * 16
collate = lambda rows: {{name: torch.tensor([row[name] for row in rows]) for name in rows[0]}}
Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate).train()
model.save_pretrained("final")
"""

MIXED_FP16 = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for step in range(3):
    x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
    with torch.autocast("cuda", dtype=torch.float16):
        output = model(x.to("cuda"))
        loss = nn.functional.cross_entropy(output, y.to("cuda"))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    right = (output.argmax(-1).cpu().numpy() == y.numpy()).mean()
"""

NEVER = "import torch\nmodel = torch.nn.Linear(4, 4).cuda()\nmodel(torch.ones(2, 4).cuda()).sum().backward()\n"
RAISES = "import torch\nweights = torch.ones(4, 4).cuda()\nraise KeyError('labels')\n"
ENDLESS = "import torch\nx = torch.ones(4).cuda()\nwhile True:\n    x = x + 1\n"
ONE_STEP = """
import torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4).cuda()).sum().backward()
optimizer.step()
torch.save(model.state_dict(), "model.pt")
"""


def run(script: str, folder: Path, *arguments: str, **asked: Any) -> subprocess.CompletedProcess[str]:
    """Trace a script; in a list of requests nothing else may run, so each has a process of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    path = folder / "request.json"
    wanted = {"script": ["python", "train.py", *arguments], "working_directory": str(folder), **GPU, **asked}
    path.write_text(json.dumps(wanted))
    return trace(path)


def trace(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainwright.estimate.trace.answer", str(path)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)


def requests_of_the_same_steps(folder: Path) -> subprocess.CompletedProcess[str]:
    """Ask for what the scripts do."""
    same: dict[str, Any] = {
        "recipe": "transformers", "batch": "full", "compute_capability": [8, 6], "capacity_bytes": 24 << 30,
    }  # fmt: skip
    lora = {"method": {"type": "lora", "r": 8}, "weights": "bf16", "gradient_checkpointing": "non_reentrant"}
    asked = [request(**same, weights="fp32"), request(**same, **lora)]
    asked.append(request(**same, weights="fp32", strategy="ddp", world_size=4))
    path = folder / "requests.json"
    path.write_text(json.dumps(asked))
    return trace(path)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("scripts")
    older = folder / "trainer/out/checkpoint-7"
    older.mkdir(parents=True)
    (older / "model.safetensors").write_bytes(b"weights")
    jobs = {
        "requests": lambda: requests_of_the_same_steps(folder),
        "loop": lambda: run(LOOP, folder / "loop"),
        "padded": lambda: run(LOOP, folder / "padded", "--mask", "--padded"),
        "ddp": lambda: run(LOOP, folder / "ddp", "--ddp", "--mask", world_size=4),
        "trainer": lambda: run(TRAINER, folder / "trainer"),
        "fp16": lambda: run(MIXED_FP16, folder / "fp16"),
        "never": lambda: run(NEVER, folder / "never"),
        "raises": lambda: run(RAISES, folder / "raises"),
        "one step": lambda: run(ONE_STEP, folder / "one"),
        "endless": lambda: run(ENDLESS, folder / "endless", limit_s=2.0),
    }
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(jobs, pool.map(lambda job: job(), jobs.values()), strict=True))


Done = dict[str, subprocess.CompletedProcess[str]]


def answer(done: Done, name: str) -> dict[str, Any]:
    assert done[name].returncode == 0, done[name].stderr
    found: dict[str, Any] = json.loads(done[name].stdout)
    return found


def refused(done: Done, name: str) -> dict[str, Any]:
    assert done[name].returncode == ExitCode.FAILED, done[name].stderr
    found: dict[str, Any] = json.loads(done[name].stdout)
    return found


def test_plain_loop_has_the_peak_of_the_same_request(done: Done) -> None:
    script, asked = answer(done, "loop"), json.loads(done["requests"].stdout)[0]
    assert script["peak"]["allocated_bytes"] == asked["peak"]["allocated_bytes"]
    assert script["static_bytes"] == asked["static_bytes"]
    assert script["parameters"] == asked["parameters"]
    for part in ("weights", "optimizer", "weight casts", "workspaces"):
        assert script["peak"]["parts_bytes"].get(part) == asked["peak"]["parts_bytes"].get(part), part


def test_trainer_with_lora_has_the_peak_of_the_same_request(done: Done) -> None:
    """The Trainer keeps a few numbers more on the GPU, for its log."""
    script, asked = answer(done, "trainer"), json.loads(done["requests"].stdout)[1]
    assert script["peak"]["allocated_bytes"] == pytest.approx(asked["peak"]["allocated_bytes"], rel=0.001)
    assert script["parameters"] == asked["parameters"]
    assert script["peak"]["parts_bytes"]["adapters"] == asked["peak"]["parts_bytes"]["adapters"]


def test_rank_of_four_under_ddp_has_the_peak_of_the_same_request(done: Done) -> None:
    script, alone = answer(done, "ddp")["peak"], answer(done, "loop")["peak"]
    asked = json.loads(done["requests"].stdout)[2]["peak"]
    assert script["allocated_bytes"] == pytest.approx(asked["allocated_bytes"], rel=0.001)
    assert script["allocated_bytes"] > alone["allocated_bytes"]


def test_attention_follows_from_the_masks_in_the_data(done: Done) -> None:
    """transformers drops a mask without padding, and flash attention takes none: the values decide."""
    assert answer(done, "ddp")["attention_kernels"].keys() == {"flash"}
    assert answer(done, "padded")["attention_kernels"].keys() == {"efficient"}


def test_fp16_with_a_gradient_scaler_makes_its_steps(done: Done) -> None:
    phases = {(phase["phase"], phase["step"]) for phase in answer(done, "fp16")["phases"]}
    assert {("forward", 1), ("backward", 1), ("optimizer", 1), ("forward", 2), ("backward", 2)} <= phases


def test_nothing_is_saved(done: Done) -> None:
    """Neither at the end nor on the way; a Trainer would also remove older checkpoints."""
    older = {"out", "out/checkpoint-7", "out/checkpoint-7/model.safetensors"}
    for name, expected in {"loop": set(), "one step": set(), "trainer": older}.items():
        folder = Path(done[name].args[-1]).parent
        found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        assert found == {"train.py", "request.json", *expected}


def test_stdout_is_for_the_figures(done: Done) -> None:
    assert "this GPU: NVIDIA GeForce RTX 3090" in done["loop"].stderr
    assert done["loop"].stdout.startswith("{") and done["loop"].stdout.count("\n") == 1


def test_script_that_never_updates_is_refused(done: Done) -> None:
    assert "ended after 0 of 2 optimizer steps" in refused(done, "never")["error"]


def test_script_that_ends_early_is_refused(done: Done) -> None:
    assert "ended after 1 of 2 optimizer steps" in refused(done, "one step")["error"]


def test_script_that_fails_says_where(done: Done) -> None:
    found = refused(done, "raises")
    assert "raised KeyError: 'labels'" in found["error"]
    assert found["problems"] == [f"{Path(done['raises'].args[-1]).parent / 'train.py'}:3: raise KeyError('labels')"]


def test_script_without_end_is_stopped(done: Done) -> None:
    assert "has not made 2 optimizer steps in 2 s" in refused(done, "endless")["error"]


def test_problems_of_a_request_are_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"script": ["train.py"], "world_size": 0, "capacity_bytes": 1, "steps": 2, "gpu": 1}))
    asked = trace(path)
    assert asked.returncode == ExitCode.USAGE
    assert "gpu: is not known" in json.loads(asked.stdout)["problems"][0]
    path.write_text(json.dumps({"script": ["python", "no_such.py"], "world_size": 0, "capacity_bytes": 1}))
    problems = json.loads(trace(path).stdout)["problems"]
    assert [problem.split(":")[0] for problem in problems] == ["script", "world_size", "local_ranks"]

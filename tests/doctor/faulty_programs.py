"""The programs that fail, by name; each is what a user might run."""

# ruff: noqa: E501 - programs are as they are

from __future__ import annotations

_LIMITED = """\
import resource
import torch
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, used + 300 * 2**20))
"""
_GLOO = """\
import datetime, faulthandler, os, signal, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
rank = dist.get_rank()
"""
_TINY = """\
import os
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)
torch.manual_seed(0)
model = GPT2LMHeadModel(config)
def rows(count=64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (count, 16), generator=draw)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]
def arguments(**more):
    return TrainingArguments(**({"output_dir": os.environ.get("DISK", os.environ["SCRATCH"]) + "/out", "use_cpu": True,
        "per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True} | more))
"""
_LOADER = """\
import ctypes, os, time
import torch
from torch.utils.data import DataLoader, Dataset
"""

PROGRAMS = {
    "no-torch": "import torch\nprint(torch.__version__)\n",
    "no-flash-attn": _TINY
    + """\
model = GPT2LMHeadModel._from_config(config, attn_implementation="flash_attention_2", dtype=torch.bfloat16)
""",
    "no-bitsandbytes-like": "import torch\nimport flash_attn_interface\n",
    "torch-without-cuda": "import torch\nmodel = torch.nn.Linear(4, 4).cuda()\n",
    "bf16-without-gpu": """\
from transformers import TrainingArguments
TrainingArguments(output_dir="out", fp16=False, bf16=True, use_cpu=False, tf32=True)
""",
    "too-many-open-files": """\
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
shards = [open("/tmp/shard-%d" % (i % 2), "ab") for i in range(100)]
""",
    "no-more-threads": """\
import os, resource, threading, time
os.setgid(65534); os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (4, 4))
for i in range(30):
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
""",
    "file-size-limit": """\
import os, resource, signal
import torch
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
torch.save({"w": torch.zeros(2**20)}, os.environ["SCRATCH"] + "/optimizer.pt")
""",
    "disk-full-torch-save": """\
import os
import torch
print("saving checkpoint-500", flush=True)
torch.save({"w": torch.zeros(2**20)}, os.environ["DISK"] + "/optimizer.pt")
""",
    "disk-full-safetensors": """\
import os
import torch
from safetensors.torch import save_file
save_file({"w": torch.zeros(2**20)}, os.environ["DISK"] + "/model.safetensors")
""",
    "disk-full-plain-write": """\
import json, os
with open(os.environ["DISK"] + "/metrics.jsonl", "w") as file:
    for step in range(100000):
        file.write(json.dumps({"step": step, "loss": 1.0}) + "\\n")
""",
    "disk-full-trainer": _TINY
    + """\
big = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=128, n_layer=2, n_head=2))
Trainer(model=big, args=arguments(save_strategy="steps", save_steps=4), train_dataset=rows()).train()
""",
    "read-only-disk": _TINY
    + """\
Trainer(model=model, args=arguments(save_strategy="steps", save_steps=4), train_dataset=rows()).train()
""",
    "no-permission": """\
import os
os.makedirs("/tmp/other-users-output", mode=0o755, exist_ok=True)
os.setgid(65534); os.setuid(65534)
os.makedirs("/tmp/other-users-output/run-1")
""",
    "truncated-safetensors": """\
import os
import torch
from safetensors.torch import load_file, save_file
path = os.environ["SCRATCH"] + "/model.safetensors"
save_file({"w": torch.zeros(2**16)}, path)
os.truncate(path, os.path.getsize(path) // 2)
load_file(path)
""",
    "empty-safetensors": """\
import os
from safetensors.torch import load_file
path = os.environ["SCRATCH"] + "/model.safetensors"
open(path, "w").close()
load_file(path)
""",
    "truncated-pt": """\
import os
import torch
path = os.environ["SCRATCH"] + "/optimizer.pt"
torch.save({"w": torch.zeros(2**16)}, path)
os.truncate(path, os.path.getsize(path) // 2)
torch.load(path)
""",
    "empty-optimizer-pt": _TINY
    + """\
trainer = Trainer(model=model, args=arguments(save_strategy="steps", save_steps=4, max_steps=4), train_dataset=rows())
trainer.train()
open(os.environ["SCRATCH"] + "/out/checkpoint-4/optimizer.pt", "w").close()
Trainer(model=model, args=arguments(max_steps=8), train_dataset=rows()).train(resume_from_checkpoint=True)
""",
    "half-checkpoint": _TINY
    + """\
trainer = Trainer(model=model, args=arguments(save_strategy="steps", save_steps=4, max_steps=4), train_dataset=rows())
trainer.train()
os.unlink(os.environ["SCRATCH"] + "/out/checkpoint-4/trainer_state.json")
Trainer(model=model, args=arguments(max_steps=8), train_dataset=rows()).train(resume_from_checkpoint=True)
""",
    "other-shapes": """\
import torch
torch.nn.Linear(8, 8).load_state_dict(torch.nn.Linear(16, 8).state_dict())
""",
    "small-shm": _LOADER
    + """\
class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.zeros(2**16)
if __name__ == "__main__":
    for batch in DataLoader(Rows(), batch_size=8, num_workers=4): time.sleep(0.1)
""",
    "small-shm-large-tensor": _LOADER
    + """\
class Rows(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.ones(2**23)
if __name__ == "__main__":
    for batch in DataLoader(Rows(), batch_size=1, num_workers=1): print(batch.sum())
""",
    "stuck-worker-with-pid": _LOADER
    + """\
class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        if index > 8:
            open(os.environ["SCRATCH"] + "/worker.pid", "w").write(str(os.getpid())); time.sleep(100)
        return torch.zeros(8)
if __name__ == "__main__":
    for batch in DataLoader(Rows(), batch_size=4, num_workers=1): print("batch", flush=True)
""",
    "worker-segfault": _LOADER
    + """\
class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return ctypes.string_at(0) if index > 8 else torch.zeros(8)
if __name__ == "__main__":
    for batch in DataLoader(Rows(), batch_size=4, num_workers=1): print("batch", flush=True)
""",
    "worker-raises": _LOADER
    + """\
class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        row = {"question": "1 + 1"} if index == 13 else {"question": "1 + 1", "answer": "2"}
        return len(row["answer"])
if __name__ == "__main__":
    for batch in DataLoader(Rows(), batch_size=4, num_workers=1): print("batch", flush=True)
""",
    "worker-stuck": _LOADER
    + """\
class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        if index > 8: time.sleep(100)
        return torch.zeros(8)
if __name__ == "__main__":
    for batch in DataLoader(Rows(), batch_size=4, num_workers=1, timeout=4): print("batch", flush=True)
""",
    "segfault-with-handler": "import ctypes, faulthandler\nfaulthandler.enable()\nctypes.string_at(0)\n",
    "segfault": "import ctypes\nprint('step 12/400 loss 2.31', flush=True)\nctypes.string_at(0)\n",
    "abort-in-shell": "import os\nprint('step 12/400 loss 2.31', flush=True)\nos.abort()\n",
    "host-allocation": _LIMITED + "x = torch.empty(2**28)\n",
    "python-memory-error": _LIMITED + "x = [bytes(range(256)) * 4096 for _ in range(10**6)]\n",
    "numpy-memory-error": _LIMITED + "import numpy as np\nx = np.ones((2**14, 2**14))\n",
    "host-oom-main": """\
import os
open(os.environ["GROUP"], "w").write(str(os.getpid()))
rows = []
print("loading data", flush=True)
while True:
    rows.append(bytearray(os.urandom(2**20)))
""",
    "host-oom-worker": _LOADER
    + """\
class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        if index > 8:
            self.kept = [bytearray(os.urandom(2**20)) for _ in range(2000)]
        return torch.zeros(8)
if __name__ == "__main__":
    open(os.environ["GROUP"], "w").write(str(os.getpid()))
    for batch in DataLoader(Rows(), batch_size=4, num_workers=1): print("batch", flush=True)
""",
    "killed-by-hand": """\
import os, time
for step in range(1000):
    print(f"step {step}/1000 loss {3 - step / 1000:.3f}", flush=True)
    if step == 5: open(os.environ["SCRATCH"] + "/main.pid", "w").write(str(os.getpid()))
    time.sleep(0.1)
""",
    "rank-killed": _GLOO
    + """\
for step in range(50):
    if rank == 1 and step == 3: os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))
""",
    "rank-raises": _GLOO
    + """\
def loss_of(step): return 1 / (3 - step)
for step in range(50):
    if rank == 1: loss_of(step)
    dist.all_reduce(torch.ones(4))
""",
    "rank-exits": _GLOO
    + """\
for step in range(50):
    if rank == 1 and step == 3: os._exit(3)
    dist.all_reduce(torch.ones(4))
""",
    "rank-segfaults": _GLOO
    + """\
import ctypes
for step in range(50):
    if rank == 1 and step == 3: ctypes.string_at(0)
    dist.all_reduce(torch.ones(4))
""",
    "rank-aborts-at-exit": _GLOO
    + """\
import atexit
group = dist.group.WORLD
def end():
    sys.setswitchinterval(1000)
    work = group.allreduce([torch.ones(1)])
    if rank == 0: work.wait(); os._exit(0)
    del work
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s: pass
atexit.register(end)
print("model saved", flush=True)
dist.destroy_process_group()
""",
    "rank-out-of-host-memory": _GLOO
    + """\
import resource
for step in range(50):
    if rank == 1 and step == 3:
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
        torch.empty(2**28)
    dist.all_reduce(torch.ones(4))
""",
    "rank-sleeps": _GLOO
    + """\
import json, threading
def load_next_batch():
    time.sleep(25)
def dump():
    time.sleep(6)
    from torch._C._distributed_c10d import _dump_fr_trace_json
    scratch = os.environ["SCRATCH"]
    open(f"{scratch}/fr_rank_{rank}.json", "wb").write(_dump_fr_trace_json())
    with open(f"{scratch}/stack_rank_{rank}.txt", "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
if "NO_DUMP" not in os.environ:
    threading.Thread(target=dump, daemon=True).start()
for step in range(50):
    if rank == 1 and step == 3: load_next_batch()
    dist.all_reduce(torch.ones(4))
""",
    "rank-stopped": _GLOO
    + """\
for step in range(50):
    if rank == 1 and step == 3: os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4))
""",
    "other-collective": _GLOO
    + """\
for step in range(5):
    if rank == 1 and step == 3: dist.broadcast(torch.ones(4), 0)
    dist.all_reduce(torch.ones(4))
""",
    "other-shape": _GLOO
    + """\
for step in range(5):
    dist.all_reduce(torch.ones(8 if rank == 1 and step == 3 else 4))
""",
    "monitored-barrier": _GLOO
    + """\
if rank == 1: time.sleep(15)
dist.monitored_barrier(timeout=datetime.timedelta(seconds=4))
""",
    "uneven-batches": _GLOO
    + """\
import threading
from torch.nn.parallel import DistributedDataParallel
def dump():
    time.sleep(6)
    from torch._C._distributed_c10d import _dump_fr_trace_json
    open(f"{os.environ['SCRATCH']}/fr_rank_{rank}.json", "wb").write(_dump_fr_trace_json())
threading.Thread(target=dump, daemon=True).start()
model = DistributedDataParallel(torch.nn.Linear(4, 4))
batches = 12 if rank == 0 else 9
for step in range(batches):
    model(torch.ones(2, 4)).sum().backward()
    print(f"[rank {rank}] batch {step + 1}/{batches}", flush=True)
if rank == 1:
    print("[rank 1] epoch done, waiting", flush=True); time.sleep(20)
""",
    "no-master": """\
import datetime
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
""",
    "not-under-torchrun": 'import torch.distributed as dist\ndist.init_process_group("gloo")\n',
    "unused-parameters": _GLOO
    + """\
from torch.nn.parallel import DistributedDataParallel
class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__(); self.a = torch.nn.Linear(4, 4); self.b = torch.nn.Linear(4, 4)
    def forward(self, x): return self.a(x)
model = DistributedDataParallel(Branches())
for step in range(3): model(torch.ones(2, 4)).sum().backward()
""",
    "models-differ": _GLOO
    + """\
from torch.nn.parallel import DistributedDataParallel
DistributedDataParallel(torch.nn.Linear(4, 4 + rank))
""",
    "loss-nan": _TINY
    + """\
Trainer(model=model, args=arguments(learning_rate=1e20, max_grad_norm=0), train_dataset=rows()).train()
""",
    "loss-diverges": """\
import torch
torch.manual_seed(0)
w = torch.zeros(8, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=1.035)  # 2 / largest eigenvalue of the loss is 1
for step in range(1, 91):
    x = torch.randn(512, 8)
    loss = ((x @ w - x.sum(1)) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print({"loss": round(loss.item(), 4), "grad_norm": round(w.grad.norm().item(), 4), "learning_rate": 1.035, "epoch": step / 30})
""",
    "loss-oscillates": """\
import torch
torch.manual_seed(0)
w = torch.zeros(8, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=0.45)
for step in range(1, 121):
    x = torch.randn(16, 8) * (1.6 if step % 2 else 0.7)
    loss = ((x @ w - (3.0 if step % 2 else 1.0) * x.sum(1)) ** 2).mean()
    optimizer.zero_grad(); loss.backward()
    torch.nn.utils.clip_grad_norm_([w], 4.0); optimizer.step()
    print({"loss": round(loss.item(), 4), "grad_norm": round(w.grad.norm().item(), 4), "learning_rate": 0.45, "epoch": step / 40})
""",
    "nothing-to-train": _TINY
    + """\
for parameter in model.parameters(): parameter.requires_grad = False
Trainer(model=model, args=arguments(), train_dataset=rows()).train()
""",
    "loss-zero": _TINY
    + """\
data = rows()
for row in data: row["labels"] = torch.full((16,), -100)
class Summed(Trainer):
    def compute_loss(self, model, inputs, **more):
        logits = model(input_ids=inputs["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), ignore_index=-100, reduction="sum")
Summed(model=model, args=arguments(), train_dataset=data).train()
""",
    "no-pad-token": """\
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
tokenizer(["a b", "a"], padding=True, return_tensors="pt")
""",
    "token-out-of-range": _TINY + "model(input_ids=torch.full((1, 4), 70), labels=torch.full((1, 4), 3))\n",
    "target-out-of-range": """\
import torch
torch.nn.functional.cross_entropy(torch.zeros(4, 3), torch.tensor([0, 1, 9, 2]))
""",
    "hub-offline": 'from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")\n',
    "hub-refuses": 'from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")\n',
    "model-path-wrong": 'from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained("./models/llama/7b/hf")\n',
    "bad-jsonl": """\
import os
from datasets import load_dataset
path = os.environ["SCRATCH"] + "/train.jsonl"
with open(path, "w") as file:
    for i in range(50): file.write('{"text": "row %d"}\\n' % i if i != 31 else '{"text": "row 31\\n')
load_dataset("json", data_files=path, split="train")
""",
    "missing-column": """\
from datasets import Dataset
data = Dataset.from_dict({"question": ["a", "b"], "answer": ["c", "d"]})
def encode(row): return {"length": len(row["instruction"])}
data.map(encode)
""",
    "ragged-labels": _TINY
    + """\
data = [{"input_ids": [1] * n, "labels": [1] * n} for n in (4, 7, 9, 3)]
Trainer(model=model, args=arguments(), train_dataset=data).train()
""",
    "data-not-found": 'from datasets import load_dataset\nload_dataset("json", data_files="data/train_v2.jsonl")\n',
    "accelerate-child-fails": """\
from accelerate import Accelerator
accelerator = Accelerator()
print("Number of processes:", accelerator.num_processes, flush=True)
def read_labels(row): return row["labels"]
read_labels({"input_ids": [1]})
""",
    "fp16-unscale": """\
import torch
model = torch.nn.Linear(4, 4).half()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu")
loss = model(torch.ones(2, 4).half()).sum()
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
""",
    "deepspeed-batch": """\
import os
os.environ |= {"WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
from deepspeed.runtime.config import DeepSpeedConfig
DeepSpeedConfig({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3})
""",
    "lora-targets": _TINY
    + """\
from peft import LoraConfig, get_peft_model
get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
""",
    "dtype-mismatch": "import torch\ntorch.nn.Linear(4, 4)(torch.ones(2, 4, dtype=torch.bfloat16))\n",
    "shape-mismatch": "import torch\ntorch.nn.Linear(8, 4)(torch.ones(2, 4))\n",
    "bad-argument": """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
parser.parse_args(["--batch_sise", "4"])
""",
    "healthy-trainer": _TINY
    + """\
Trainer(model=model, args=arguments(learning_rate=1e-3, num_train_epochs=3), train_dataset=rows()).train()
print("training finished, model saved")
""",
    "healthy-warnings": """\
import traceback, warnings
warnings.warn("CUDA initialization: no NVIDIA driver found, using the CPU")
try:
    import flash_attn
except ImportError as error:
    print(f"flash_attn is not there ({error}), using the built-in attention")
for attempt in range(2):
    try:
        if attempt == 0: raise ConnectionError("Connection reset by peer")
    except ConnectionError:
        traceback.print_exc(); print("retrying in 1 s")
for step in range(1, 81):
    print({"loss": round(3 / (1 + step / 20), 4), "grad_norm": 1.1, "learning_rate": 1e-5, "epoch": step / 40})
print({"train_runtime": 20.1, "train_samples_per_second": 31.8, "train_steps_per_second": 3.98, "train_loss": 1.61, "epoch": 2.0})
""",
}

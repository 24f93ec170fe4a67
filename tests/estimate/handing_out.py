"""How ranks get a saved model, as the workers do it; a script for `gloo.run_group`.

    python handing_out.py FOLDER CASES.json

For each `[strategy, method]` every rank prints the private bytes that it added while the model was built, the bytes of
the parameters that it then held, how many parameters the model has, the most that was resident until the strategy had
it, and whether the weights are those of the file.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from gloo import joined
from loading_models import private_bytes
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from trainwright.job.schema import Job
from trainwright.launch.files.deepspeed import engine_config
from trainwright.plan.layout import Layout
from trainwright.runs.folder import RunFolder
from trainwright.train.assignment import Assignment
from trainwright.train.models import build_model, count_parameters
from trainwright.train.ranks import Ranks
from trainwright.train.strategies.zero import import_deepspeed
from trainwright.train.worker import build_assigned, hand_to_strategy

CLASS = "AutoModelForCausalLM"


def handed_out(folder: Path, strategy: str, method: str) -> dict[str, Any]:
    """Let this rank get the model."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    adapters = {} if method == "full" else {"r": 8}
    job = Job.model_validate(
        {"name": "x", "task": "causal-lm", "model": {"name": str(folder)}, "method": {"type": method, **adapters}}
    )
    layout = Layout(
        device="cpu",
        visible_devices=None,
        ranks=ranks.world_size,
        strategy=strategy,
        precision="bf16",
        offload="none",
        global_batch_size=ranks.world_size,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        eval_batch_size=1,
        gradient_checkpointing=False,
    )
    config = Path(os.environ["STORE"]).with_name(f"{strategy}.{ranks.rank}.json")
    if strategy.startswith("zero"):
        config.write_text(json.dumps(engine_config(job, layout)))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, resident = private_bytes(), _resident("VmRSS")
    model = build_assigned(job, CLASS, None, Assignment.from_environment(asdict(layout)), ranks)
    built = private_bytes() - before
    held = sum(p.untyped_storage().nbytes() for p in model.parameters() if not (p.is_meta or p.requires_grad))
    total = count_parameters(model).total
    run_folder = cast(RunFolder, SimpleNamespace(deepspeed_json=config))
    got = hand_to_strategy(model, job, Assignment.from_environment(asdict(layout)), ranks, run_folder)
    peak = _resident("VmHWM") - resident
    same = _packed_alike(got.module, job) if method == "qlora" else _as_in_the_file(got, folder)
    return {"built": built, "held": held, "total": total, "peak": peak, "same": same}


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def _as_in_the_file(strategy: Any, folder: Path) -> bool:
    file = load_file(folder / "model.safetensors")
    return all(torch.equal(weight, file[name].to(torch.bfloat16).float()) for name, weight in strategy.gather_weights())


def _packed_alike(module: torch.nn.Module, job: Job) -> bool:
    """Whether this rank has its rows of what one process packs alone, and adapters that begin as there."""
    whole = build_model(job, auto_class=CLASS, tokenizer=None, precision="bf16", on_meta=False)
    alone = dict(whole.named_parameters())
    found = dict(module.named_parameters())
    assert found.keys() == alone.keys()
    return all(_rows_of(found[name], parameter) for name, parameter in alone.items())


def _rows_of(found: torch.Tensor, whole: torch.Tensor) -> bool:
    assert isinstance(found, DTensor) and found.shape == whole.shape
    rows = -(-whole.shape[0] // dist.get_world_size())
    own = whole.detach()[dist.get_rank() * rows : (dist.get_rank() + 1) * rows]
    return torch.equal(found.to_local().view(torch.uint8), own.view(torch.uint8))


def main() -> None:
    """Go through the cases."""
    torch.set_num_threads(1)
    os.environ["TRAINWRIGHT_ATTEMPT"] = "1"
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401

    import_deepspeed()
    torch.ones(64, 64) @ torch.ones(64, 64)  # neither libraries nor a first product are part of a model
    with joined():
        found = [handed_out(Path(sys.argv[1]), *case) for case in json.loads(sys.argv[2])]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

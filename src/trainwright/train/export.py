"""The result: `final_model/`, which plain transformers or peft loads in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainwright.framework_imports import left_out
from trainwright.job.schema import Job
from trainwright.runs.folder import RunFolder
from trainwright.runs.storage import retry_storage
from trainwright.runs.trash import remove, set_aside
from trainwright.runs.writing import write_json_atomic
from trainwright.train.models import build_model
from trainwright.train.ranks import Ranks
from trainwright.train.strategies.protocol import Strategy
from trainwright.train.strategies.states import stored_name, trained_parameters


def export_final_model(
    folder: RunFolder,
    job: Job,
    strategy: Strategy,
    ranks: Ranks,
    tokenizer: Any,
    *,
    auto_class: str,
    attempt: int,
    record: dict[str, Any],
) -> Path:
    """Write the trained model with its tokenizer; `record` goes beside it as trainwright.json, the mark of the end.

    Adapters are written as peft writes them; with `method.merge` the merged model goes to `merged/`. A model from
    scratch is saved in fp32, one that was loaded in the dtype it came with. Rank 0 holds one copy in host memory.
    """
    weights = {}
    for name, tensor in strategy.gather_weights():
        if ranks.is_first:
            weights[name] = tensor.detach().to("cpu", copy=True)
    if ranks.is_first:
        staging = folder.path / f".staging-final-attempt-{attempt}"

        def write() -> None:
            remove(staging)
            staging.mkdir(mode=0o700)
            with left_out("deepspeed"):  # transformers looks whether the model is wrapped by it
                _write(staging, job, strategy.module, weights, tokenizer, auto_class)
            write_json_atomic(staging / "trainwright.json", record)
            if folder.final_model_dir.exists():
                set_aside(folder.final_model_dir)
            staging.rename(folder.final_model_dir)
            folder.sweep()

        retry_storage(write, "saving final_model", path=folder.path)
    ranks.barrier()
    return folder.final_model_dir


def _write(
    staging: Path, job: Job, module: Any, weights: dict[str, torch.Tensor], tokenizer: Any, auto_class: str
) -> None:
    tokenizer.save_pretrained(staging)
    if hasattr(module, "peft_config"):
        named = {name: weights[stored_name(name)] for name, _ in trained_parameters(module)}
        module.save_pretrained(staging, state_dict=named)
        if job.method.merge:
            _write_merged(staging / "merged", staging, job, tokenizer, auto_class)
        return
    dtype = _source_dtype(job)
    module.save_pretrained(staging, state_dict={name: _cast(tensor, dtype) for name, tensor in weights.items()})


def _write_merged(merged_dir: Path, adapter_dir: Path, job: Job, tokenizer: Any, auto_class: str) -> None:
    """Merge into a fresh base in its own precision: a 4-bit base cannot take the adapters up."""
    from peft import PeftModel

    plain = job.model_copy(update={"method": job.method.model_copy(update={"type": "full", "adapter": None})})
    base = build_model(plain, auto_class=auto_class, tokenizer=tokenizer, precision="fp32", on_meta=False)
    model = PeftModel.from_pretrained(base, adapter_dir).merge_and_unload()
    dtype = _source_dtype(job)
    if dtype is not None:
        model.to(dtype)
    model.save_pretrained(merged_dir)
    tokenizer.save_pretrained(merged_dir)


def _source_dtype(job: Job) -> torch.dtype | None:
    if job.model.from_scratch is not None:
        return None
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(job.model.name, revision=job.model.revision, trust_remote_code=False)
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

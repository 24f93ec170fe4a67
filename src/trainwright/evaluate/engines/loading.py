"""A causal language model, loaded where it is to answer: safetensors only, and no code that came with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from trainwright.anatomy import Anatomy, anatomy, read_config
from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.engines.engine import EngineSettings, Placement
from trainwright.hardware.host import read_host
from trainwright.hardware.inventory import Device
from trainwright.hardware.reading import GIB
from trainwright.model_folder import loading_errors, require_safe
from trainwright.out_of_memory import is_out_of_memory
from trainwright.plan.modes import answer_dtype

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS_SHARE = 0.9
"""Of each GPU that weights may take when layers are spread; the rest is for keys, values and a pass."""


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode with its tokenizer, and what is known of it."""

    model: Any
    tokenizer: Any
    dtype: str
    anatomy: Anatomy | None
    """None for a family that is not described here."""
    longest: int | None
    """Tokens that it reads at most."""
    free_bytes: Callable[[], int]
    """What is free where it stands; of several GPUs the least."""
    notes: tuple[str, ...]


def load(settings: EngineSettings) -> Loaded:
    """Return the model and its tokenizer; tokens are chosen greedily, whatever its files recommend.

    Raises:
        UserError: there are no such files or GPUs (exit code 4), or the weights do not fit (exit code 77).
    """
    name = str(Path(settings.model).expanduser()) if Path(settings.model).expanduser().is_dir() else settings.model
    choice = answer_dtype(_device(settings.devices), settings.dtype)
    _refuse_pickled_adapter(Path(name))
    require_safe(name, settings.revision)
    tokenizer = _loaded(settings, AutoTokenizer, name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    options = {"dtype": _DTYPES[choice.value], "use_safetensors": True, "device_map": _device_map(settings.devices)}
    if isinstance(settings.devices, tuple) and len(settings.devices) > 1:
        options["max_memory"] = {gpu: int(_free_on(gpu) * WEIGHTS_SHARE) for gpu in settings.devices}
    model = _loaded(settings, AutoModelForCausalLM, name, **options)
    _refuse_offloaded(model)
    model.eval()
    # Sampling, and penalties that count the padding, are what generation_config.json may ask for.
    stop = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id if stop is None else stop,
        pad_token_id=tokenizer.pad_token_id,
    )
    text_config = model.config.get_text_config()
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        dtype=choice.value,
        anatomy=_anatomy(model.config),
        longest=getattr(text_config, "max_position_embeddings", None),
        free_bytes=lambda: _free_bytes(settings.devices) // settings.processes,
        notes=(f"{choice.value}: {choice.reason}",) if choice.reason else (),
    )


def _loaded(settings: EngineSettings, kind: Any, name: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(name, revision=settings.revision, trust_remote_code=False, **options)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the weights of {name} do not fit on {_words(settings.devices)}",
            hints=out_of_memory_hints(settings.devices),
            exit_code=ExitCode.OUT_OF_MEMORY,
        ) from error
    except loading_errors() as error:
        if is_out_of_memory(error):
            raise
        where = f"the folder {name}" if Path(name).is_dir() else f"`{name}`"
        what = "tokenizer" if kind is AutoTokenizer else "model"
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the {what} cannot be loaded from {where}: {first}",
            hints=[
                "a folder needs config.json, a tokenizer and *.safetensors (pickled weights are never loaded)",
                "a hub model must be in the cache (HF_HUB_CACHE) when there is no network",
            ],
            exit_code=ExitCode.MISSING,
        ) from error


def out_of_memory_hints(devices: Placement) -> list[str]:
    """Return what helps when memory runs out; fewer GPUs do not where they share the layers (X-13)."""
    smaller = ["shorter passages, or fewer of them", "a smaller model"]
    if devices == "cpu":
        return ["fewer workers: they share the host's memory", "dtype=bf16 takes half of fp32", *smaller]
    if isinstance(devices, tuple) and len(devices) > 1:
        return ["more GPUs to a copy: its layers are spread over all of them", *smaller]
    return ["gpu_mode=accelerate spreads the layers over several GPUs", *smaller]


def _refuse_pickled_adapter(folder: Path) -> None:
    """Peft would fall back to a pickled adapter_model.bin."""
    if (folder / "adapter_config.json").is_file() and not (folder / "adapter_model.safetensors").is_file():
        raise UserError(
            f"the adapter in {folder} has no adapter_model.safetensors (pickled weights are never loaded)",
            exit_code=ExitCode.MISSING,
        )


def _refuse_offloaded(model: Any) -> None:
    places = set(getattr(model, "hf_device_map", {}).values())
    if places & {"cpu", "disk"} and len(places) > 1:
        raise UserError(
            "the layers do not fit on the GPUs together: some would be left in host memory",
            hints=["more GPUs to a copy", "a smaller model"],
            exit_code=ExitCode.NO_PLAN_FITS,
        )


def _anatomy(config: Any) -> Anatomy | None:
    try:
        return anatomy(read_config(json.loads(config.to_json_string(use_diff=False))))
    except UserError:
        return None


def _device(devices: Placement) -> Device:
    if isinstance(devices, str):
        return Device(kind=devices, name=devices)
    visible_gpus = torch.cuda.device_count()
    if missing := [gpu for gpu in devices if gpu >= visible_gpus]:
        raise UserError(
            f"GPU {', '.join(map(str, missing))} is asked for, and torch sees {visible_gpus}",
            hints=["trainwright gpus lists what there is", "CUDA_VISIBLE_DEVICES hides GPUs"],
            exit_code=ExitCode.MISSING,
        )
    slowest = min(devices, key=torch.cuda.get_device_capability)
    return Device(
        kind="cuda",
        name=torch.cuda.get_device_name(slowest),
        compute_capability=torch.cuda.get_device_capability(slowest),
    )


def _device_map(devices: Placement) -> Any:
    if isinstance(devices, str):
        return {"": devices}
    return {"": devices[0]} if len(devices) == 1 else "auto"


def _free_bytes(devices: Placement) -> int:
    if isinstance(devices, tuple):
        return min(map(_free_on, devices))
    if devices == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    available = read_host()[0].memory_available_bytes
    return available if isinstance(available, int) else GIB


def _free_on(gpu: int) -> int:
    """With what torch's allocator holds and does not use."""
    return int(torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu))


def _words(devices: Placement) -> str:
    return devices if isinstance(devices, str) else f"GPU {', '.join(map(str, devices))}"

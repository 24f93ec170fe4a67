"""The model of a job: loaded or made from scratch, with its method applied."""

from __future__ import annotations

import difflib
import fnmatch
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.errors import ExitCode, UserError, not_installed
from trainwright.framework_imports import left_out
from trainwright.job.schema import Job, MethodSection
from trainwright.model_folder import loading_errors, require_safe, require_whole
from trainwright.out_of_memory import is_out_of_memory
from trainwright.train.precision import COMPUTE_DTYPES
from trainwright.train.strategies.handing_out import WHOLE_SHAPE

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PEFT_TASK_TYPES = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters, and of layers that carry an adapter."""

    total: int
    trainable: int
    adapter_layers: int

    @property
    def trainable_pct(self) -> float:
        """Share of the parameters that is trained."""
        return 100 * self.trainable / self.total


def build_model(
    job: Job,
    *,
    auto_class: str,
    tokenizer: Any,
    precision: str,
    on_meta: bool,
    loading: AbstractContextManager[None] | None = None,
) -> nn.Module:
    """Return the job's model with its method applied, on the CPU, or without storage when `on_meta`.

    A saved model is read within the context `loading`, if there is one. Weights that are trained are fp32; a frozen
    base under adapters has the compute dtype, so that fp16 never meets gradients of fp16 weights ("Attempting to
    unscale FP16 gradients").

    Raises:
        UserError: unknown architecture or dimension, missing files, unsafe weights, or nothing left to train.
    """
    dtype = torch.float32 if job.method.type == "full" else COMPUTE_DTYPES[precision]
    torch.manual_seed(job.train.seed)
    if job.model.from_scratch is not None:
        model = _from_scratch(job, auto_class, tokenizer, dtype, on_meta)
    else:
        with loading or nullcontext():
            model = _from_pretrained(job, auto_class, dtype, on_meta)
    model.config.use_cache = False
    # For layers that it packed, of which there are none where it was not imported to load them.
    with left_out("bitsandbytes"):
        model = _apply_method(model, job.method, auto_class)
    if count_parameters(model).trainable == 0:
        raise UserError(
            "no parameter is left to train",
            hints=[f"method.freeze={list(job.method.freeze)} freezes every parameter; freeze fewer"],
        )
    return model


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count parameters as they were before 4-bit packing; sharded parameters count with their full size."""
    total = trainable = 0
    for parameter in model.parameters():
        packed = getattr(getattr(parameter, "quant_state", None), "shape", None)
        shape = packed or getattr(parameter, WHOLE_SHAPE, None) or getattr(parameter, "ds_shape", None)
        size = int(torch.Size(shape).numel()) if shape is not None else parameter.numel()
        total += size
        trainable += size if parameter.requires_grad else 0
    adapters = sum(1 for module in model.modules() if hasattr(module, "lora_A") and len(module.lora_A) > 0)
    return ParameterCount(total, trainable, adapters)


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Recompute activations in the backward pass.

    The non-reentrant kind, as it needs no gradient on the inputs (frozen base) and works with DDP and FSDP2.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _from_scratch(job: Job, auto_class: str, tokenizer: Any, dtype: torch.dtype, on_meta: bool) -> nn.Module:
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert job.model.from_scratch is not None
    architecture, dimensions = job.model.from_scratch.architecture, job.model.from_scratch.dimensions
    if architecture not in CONFIG_MAPPING:
        near = difflib.get_close_matches(architecture, CONFIG_MAPPING.keys(), n=3)
        raise UserError(
            f"model.from_scratch.architecture: transformers knows no `{architecture}`",
            hints=[f"did you mean {', '.join(near)}?"] if near else [],
        )
    known = CONFIG_MAPPING[architecture]().to_dict().keys() | CONFIG_MAPPING[architecture].attribute_map.keys()
    unknown = [name for name in dimensions if name not in known]
    if unknown:
        raise UserError(
            f"model.from_scratch.dimensions: `{architecture}` has no {', '.join(unknown)}",
            hints=[
                f"`{name}`: did you mean {', '.join(near)}?"
                for name in unknown
                if (near := difflib.get_close_matches(name, known, n=3))
            ],
        )
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    if tokenizer.bos_token_id is not None:
        special["bos_token_id"] = tokenizer.bos_token_id
    if auto_class == "AutoModelForSeq2SeqLM":
        special["decoder_start_token_id"] = tokenizer.pad_token_id
    try:
        config = AutoConfig.for_model(architecture, **{"vocab_size": len(tokenizer)} | special | dimensions)
        with torch.device("meta" if on_meta else "cpu"):
            model: nn.Module = getattr(transformers, auto_class).from_config(
                config, dtype=dtype, **_attention(job), trust_remote_code=False
            )
    except loading_errors() as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"model.from_scratch: transformers refuses these dimensions: {error}",
            hints=["hidden_size must be a multiple of num_attention_heads, and the like"],
        ) from error
    return model


def _from_pretrained(job: Job, auto_class: str, dtype: torch.dtype, on_meta: bool) -> nn.Module:
    import transformers

    name, revision = str(job.model.name), job.model.revision
    require_safe(name, revision)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False, **_attention(job)}
    try:
        if on_meta:
            config = transformers.AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
            with torch.device("meta"):
                model: nn.Module = getattr(transformers, auto_class).from_config(
                    config, dtype=dtype, **_attention(job), trust_remote_code=False
                )
            return model
        if job.method.type == "qlora":
            options["quantization_config"] = _nf4(dtype)
        model = getattr(transformers, auto_class).from_pretrained(name, dtype=dtype, use_safetensors=True, **options)
    except loading_errors() as error:
        if is_out_of_memory(error):
            raise
        where = f"folder {name}" if Path(name).is_dir() else f"`{name}`"
        raise UserError(
            f"the model cannot be loaded from {where}: {str(error).strip().splitlines()[0]}",
            hints=[
                "a folder needs config.json and *.safetensors (pickled weights are never loaded)",
                "a hub model must be in the cache (HF_HUB_CACHE) when there is no network",
            ],
            exit_code=ExitCode.MISSING,
        ) from error
    if job.method.type == "qlora":
        _keep_packing(model)
    return model


def _attention(job: Job) -> dict[str, str]:
    chosen = job.model.attn_implementation
    return {} if chosen == "auto" else {"attn_implementation": chosen}


def _nf4(compute_dtype: torch.dtype) -> Any:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise not_installed("method.type=qlora", "bitsandbytes", extra="qlora", instead="method.type=lora") from error
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        # FSDP2 shards by dtype: the packed weights must have that of their neighbours.
        bnb_4bit_quant_storage=compute_dtype,
    )


def _keep_packing(model: nn.Module) -> None:
    """Keep bitsandbytes (0.50) from repacking 4-bit weights for AVX512 when it first evaluates on the CPU.

    The repacked weights lose precision in the training that follows, and a sharded copy of them is thrown away while
    their description stays.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _apply_method(model: nn.Module, method: MethodSection, auto_class: str) -> nn.Module:
    if method.type == "full":
        _freeze(model, method.freeze)
        return model
    from peft import LoraConfig, get_peft_model

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if method.adapter is not None:
        return _with_adapter(model, method.adapter)
    config = LoraConfig(
        r=method.r,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        target_modules=method.targets,
        task_type=PEFT_TASK_TYPES.get(auto_class),
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        linear = sorted({name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise UserError(
            f"method.targets: {str(error).splitlines()[0]}",
            hints=[f"linear modules of this model: {', '.join(linear)}", "method.targets=all-linear takes them all"],
        ) from error


def _with_adapter(model: nn.Module, adapter: str) -> nn.Module:
    """Go on from an adapter: a folder, a hub name, or a folder inside a hub model (`owner/model/speech-lora`)."""
    from peft import PeftModel

    folder = Path(adapter) if Path(adapter).is_dir() else _downloaded_adapter(adapter)
    # Looked at first: peft would fall back to a pickled adapter_model.bin.
    missing = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
    if missing:
        raise _no_adapter(adapter, f"{folder} has no {' and no '.join(missing)}")
    require_whole(folder)
    return PeftModel.from_pretrained(model, folder, is_trainable=True)


def _downloaded_adapter(adapter: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    owner, _, rest = adapter.partition("/")
    name, _, inside = rest.partition("/")
    wanted = [f"{inside}/{name}".lstrip("/") for name in ADAPTER_FILES]
    try:
        return Path(snapshot_download(f"{owner}/{name}", allow_patterns=wanted)) / inside
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise _no_adapter(adapter, str(error).strip().splitlines()[0]) from error


def _no_adapter(adapter: str, reason: str) -> UserError:
    return UserError(
        f"method.adapter: no adapter can be loaded from `{adapter}`: {reason}",
        hints=[
            f"an adapter is a folder with {' and '.join(ADAPTER_FILES)}",
            "method.adapter=null begins with a new one",
        ],
        exit_code=ExitCode.MISSING,
    )


def _freeze(model: nn.Module, patterns: list[str]) -> None:
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = fnmatch.filter(named, pattern)
        if not matched:
            raise UserError(
                f"method.freeze: `{pattern}` matches no parameter",
                hints=[f"parameters are named like {', '.join(list(named)[:3])}; `encoder.*` freezes all of a part"],
            )
        for name in matched:
            named[name].requires_grad_(False)

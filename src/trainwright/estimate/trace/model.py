"""The model of a request with its method applied, built from its config alone."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trainwright.errors import UserError
from trainwright.estimate.request import Request
from trainwright.estimate.trace import flash_attention, fused, quantized, stacked_experts
from trainwright.model_folder import require_plain

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "uint8": torch.uint8}
PEFT_TASK_TYPES = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}
_SHIFTED_COPY = "ForCausalLMWithShiftedCopy"
TRL_KEEPS = ("lm_head", "embed_tokens", "wte", "wpe")
"""Modules that stay in half precision: trl/trainer/utils.py (`peft_module_casting_to_bf16`)."""


def build_config(request: Request, *, layers: int | None = None) -> Any:
    """Return the transformers config, with another number of layers if asked for.

    Raises:
        UserError: transformers knows no such `model_type`, or refuses the dimensions.
    """
    import huggingface_hub.errors
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    require_plain(request.config, "config")
    model_type = request.config["model_type"]
    if model_type not in CONFIG_MAPPING:
        import transformers

        raise UserError(f"config.model_type: transformers {transformers.__version__} knows no `{model_type}`")
    values = {name: value for name, value in request.config.items() if name != "quantization_config"}
    if layers is not None:
        values = _shortened(values, CONFIG_MAPPING[model_type], layers)
    # transformers 5 checks configs with huggingface_hub's dataclasses, whose error is no ValueError.
    refused = getattr(huggingface_hub.errors, "StrictDataclassError", ValueError)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(values)
    except (ValueError, TypeError, refused) as error:
        raise UserError(f"config: transformers refuses it: {str(error).strip().splitlines()[-1].strip()}") from error
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # which token begins a response changes no size
    return config


def _shortened(values: dict[str, Any], kind: Any, layers: int) -> dict[str, Any]:
    """Return a config with fewer layers, and with lists that say something of each layer cut to them."""
    found = dict(values)
    names = getattr(kind, "attribute_map", {})
    full = values.get(names.get("num_hidden_layers", "num_hidden_layers"))
    for name in ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"):
        if names.get(name, name) in values:
            found[names.get(name, name)] = layers
    for name, value in values.items():
        if isinstance(value, list) and (name == "layer_types" or (len(value) == full and layers < len(value))):
            found[name] = value[:layers]
    inner = values.get("text_config")
    if isinstance(inner, dict):
        found["text_config"] = _shortened(inner, kind.sub_configs.get("text_config", kind), layers)
    return found


def parameters_on_meta(request: Request, config: Any) -> int:
    """Count the parameters of the whole model, built without memory."""
    import transformers

    with without_initial_values(), torch.device("meta"):
        model: nn.Module = getattr(transformers, request.auto_class).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def build_model(request: Request, config: Any) -> nn.Module:
    """Return the model in training mode on the request's device, weights without values.

    Raises:
        UserError: transformers or peft refuse the config, or bitsandbytes is missing.
    """
    import transformers

    dtype = DTYPES[request.base_dtype]
    renamed = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    options: dict[str, Any] = {renamed: dtype}
    attention = flash_attention.implementation(request.attention)
    if attention is not None:
        options["attn_implementation"] = attention
    with without_initial_values(), torch.device(request.device):
        try:
            model: nn.Module = getattr(transformers, request.auto_class).from_config(config, **options)
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"config: transformers cannot build this model: {error}") from error
        if request.attention == flash_attention.NAME:
            flash_attention.play(model, request.repeated_heads)
        if request.separate_experts:
            stacked_experts.separate(model)
        if request.fp32_logits:
            model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits.float())
        if request.shifted_logits_copied:
            _copy_shifted_logits(model)
        if request.method.type != "full" and request.base_dtype == "fp16":
            _keep_some_in_fp32(model)
        model = _with_method(model, request)
        fused.fuse(model, request)
    let_masks_be_skipped()
    if request.gradient_checkpointing != "none":
        reentrant = request.gradient_checkpointing == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant and request.method.type != "full":
            model.enable_input_require_grads()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model.train()


def _keep_some_in_fp32(model: Any) -> None:
    """Loading an fp16 model leaves these in fp32: transformers/modeling_utils.py (`_get_dtype_plan`)."""
    endings = tuple(model._keep_in_fp32_modules or ())
    for name, module in model.named_modules():
        if name.endswith(endings):
            for parameter in module.parameters():
                parameter.data = parameter.data.to(torch.float32)


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters, packed ones counted as they were, and of those that are trained."""
    layers = [module for module in model.modules() if quantized.is_packed(module)]
    packed = sum(layer.in_features * layer.out_features for layer in layers)
    stored = sum(layer.packed_numel() for layer in layers)
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters) - stored + packed
    return {"total": total, "trainable": sum(p.numel() for p in parameters if p.requires_grad)}


def let_masks_be_skipped() -> None:
    """transformers takes a fake tensor for one of torch.export, and makes a mask that a real run leaves out."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers") and "is_tracing" in vars(module):
            vars(module)["is_tracing"] = _is_not_tracing


def _is_not_tracing(tensor: object = None) -> bool:
    return False


def _with_method(model: nn.Module, request: Request) -> nn.Module:
    method = request.method
    if method.type == "full":
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if any(fnmatch.fnmatch(name, pattern) for pattern in method.freeze):
                parameter.requires_grad_(False)
        return model
    from peft import LoraConfig, get_peft_model

    if method.type == "qlora":
        how = request.config.get("quantization_config") or {}
        quantized.pack(model, how, compute_dtype=DTYPES[request.precision], storage=DTYPES[request.quant_storage])
    model.requires_grad_(False)
    if method.upcast_frozen != "none":
        quantized.upcast(model, kept=TRL_KEEPS if method.upcast_frozen == "trl" else ())
    config = LoraConfig(
        r=method.r,
        lora_alpha=method.alpha,
        lora_dropout=method.dropout,
        target_modules=method.targets,
        task_type=PEFT_TASK_TYPES.get(request.auto_class),
    )
    config._register_custom_module(quantized.adapters_of_packed())
    try:
        adapted: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=method.adapter_dtype == "fp32")
    except ValueError as error:
        raise UserError(f"method.targets: {str(error).splitlines()[0]}") from error
    return adapted


@contextmanager
def without_initial_values() -> Iterator[None]:
    """Skip initialization: nothing is there to initialize, and rejection sampling would never end."""
    replaced: list[tuple[Any, str, Any]] = []
    for module in _initializers():
        for name, function in list(vars(module).items()):
            if name.endswith("_") and not name.startswith("_") and callable(function):
                replaced.append((module, name, function))
                setattr(module, name, _leave)
    try:
        yield
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


def _initializers() -> Sequence[Any]:
    modules: list[Any] = [torch.nn.init]
    if "transformers.initialization" in sys.modules:  # transformers 5
        modules.append(sys.modules["transformers.initialization"])
    return modules


def _leave(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _copy_shifted_logits(model: nn.Module) -> None:
    """Let a model compute its loss as transformers 4.46 to 4.48 do: loss/loss_utils.py, `ForCausalLMLoss`.

    They cut off the last position of the logits by a copy in fp32; since 4.49 the labels are padded instead.
    """
    if hasattr(model, "loss_function"):
        from transformers.loss.loss_utils import LOSS_MAPPING

        LOSS_MAPPING[_SHIFTED_COPY] = _with_shifted_copy
        model.loss_type = _SHIFTED_COPY  # type: ignore[assignment]


def _with_shifted_copy(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    targets = labels[..., 1:].contiguous().view(-1)
    return functional.cross_entropy(shifted, targets)

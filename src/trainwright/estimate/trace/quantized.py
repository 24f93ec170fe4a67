"""Stand-ins for 4-bit linear layers of frozen weights: their memory, without their kernels.

nf4: `Linear4bit` with nested scales of bitsandbytes 0.43 to 0.50 (functional.py `quantize_4bit`, `dequantize_4bit`;
autograd/_functions.py `MatMul4Bit`). Its `Params4bit` is a tensor subclass, which cannot wrap a fake tensor.
GPTQ: `QuantLinear` with the Triton kernels of AutoGPTQ 0.7 and GPTQModel (nn_modules/qlinear/qlinear_tritonv2.py,
nn_modules/triton_utils/dequant.py).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from trainwright.errors import ExitCode, UserError

NF4_BLOCK = 64
NF4_NESTED_BLOCK = 256
GPTQ_GROUP = 128
"""Weights that share a scale in GPTQ, where the config does not say."""


class Packed(Protocol):
    """A linear layer whose weights are packed."""

    weight: torch.Tensor
    in_features: int
    out_features: int
    compute_dtype: torch.dtype

    def unpacked(self) -> torch.Tensor:
        """Return the weights (out, in) in the compute dtype."""

    def packed_numel(self) -> int:
        """Return how many elements the parameters count that stand for the weights."""


class _Product(torch.autograd.Function):
    """The product with unpacked weights, which are unpacked once more for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, bias: torch.Tensor | None, layer: Packed) -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(inputs, layer.unpacked(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient @ ctx.layer.unpacked().to(gradient.dtype), None, None


def is_packed(module: nn.Module) -> bool:
    """Whether `pack` made this layer."""
    return hasattr(module, "unpacked")


def pack(model: nn.Module, method: dict[str, Any], *, compute_dtype: torch.dtype, storage: torch.dtype) -> None:
    """Replace the linear layers of a model, as `method`, the config's quantization_config, says; nf4 if it is empty.

    Raises:
        UserError: bitsandbytes is missing, or another method is asked for.
    """
    kind = method.get("quant_method", "bitsandbytes")
    kept = _never_packed(model)
    layer: Callable[..., nn.Module]
    if kind == "bitsandbytes":
        layer = _nf4_class()
    elif kind == "gptq" and method.get("bits") == 4:
        layer = functools.partial(_gptq_class(), group=method.get("group_size", GPTQ_GROUP))
        kept.add("gate")  # AutoGPTQ packs the matrices that it knows by name; the router of experts is none of them
    else:
        raise UserError(
            f"config.quantization_config: base models packed with {kind} are not traced",
            hints=["there are bitsandbytes (nf4) and gptq with 4 bits"],
        )
    for name, module in _linear_layers(model):
        if not any(name == k or name.endswith(f".{k}") or name.startswith(f"{k}.") for k in kept):
            model.set_submodule(name, layer(module, compute_dtype, storage))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def upcast(model: nn.Module, *, kept: Sequence[str]) -> None:
    """Make half-precision weights fp32, but for packed ones and modules whose name holds one of `kept`.

    peft/utils/other.py (`prepare_model_for_kbit_training`), which leaves GPTQ models as they are.
    """
    packed = {id(p) for module in model.modules() if is_packed(module) for p in module._parameters.values()}
    if any(isinstance(module, _gptq_class()) for module in model.modules()):
        return
    for name, parameter in model.named_parameters():
        half = parameter.dtype in (torch.float16, torch.bfloat16)
        if half and id(parameter) not in packed and not any(part in name for part in kept):
            parameter.data = parameter.data.to(torch.float32)


def _linear_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    from transformers.pytorch_utils import Conv1D

    # Subclasses stay: transformers/integrations/bitsandbytes.py (`replace_with_bnb_linear`).
    return [(name, module) for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]


def _never_packed(model: Any) -> set[str]:
    """transformers/quantizers/base.py (`get_keys_to_not_convert`): output embedding, tied weights, the last module."""
    named = dict(model.named_modules())
    output = model.get_output_embeddings()
    uses = Counter(id(p) for module in named.values() for p in module._parameters.values() if p is not None)
    last = list(model.named_parameters())[-1][0].rpartition(".")[0]
    kept = {last, *(model._keep_in_fp32_modules or ())}
    for name, module in named.items():
        weight = module._parameters.get("weight")
        if module is output or (weight is not None and uses[id(weight)] > 1):
            kept.add(name)
    return kept


def _shape(linear: Any) -> tuple[int, int]:
    """Return (in, out) of a linear layer or of a Conv1D, which holds its weights transposed."""
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    return linear.weight.shape[0], linear.weight.shape[1]


@functools.cache
def _nf4_class() -> Any:
    try:
        from bitsandbytes.nn import Linear4bit
    except ImportError as error:
        raise UserError(
            "method.type=qlora is traced with bitsandbytes",
            hints=["pip install 'trainwright[qlora]'"],
            exit_code=ExitCode.MISSING,
        ) from error

    class Nf4Linear(Linear4bit):
        def __init__(self, linear: Any, compute_dtype: torch.dtype, storage: torch.dtype) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features = _shape(linear)
            self.compute_dtype, self.compute_type_is_set = compute_dtype, True
            self.quant_storage, self.quant_state = storage, None
            weights = linear.weight.numel()
            empty = functools.partial(torch.empty, device=linear.weight.device)
            self.weight = nn.Parameter(empty(weights // 2 // storage.itemsize, 1, dtype=storage), requires_grad=False)
            self.weight.compress_statistics, self.weight.quant_type = True, "nf4"
            self.bias = linear.bias  # after the weights, as bitsandbytes registers them: FSDP2 goes by that order
            blocks = -(-weights // NF4_BLOCK)
            self._absmax = empty(blocks, dtype=torch.uint8)
            # Held outside of buffers, as the quantization state is: FSDP neither shards nor casts it.
            self._scales = [empty(size) for size in (-(-blocks // NF4_NESTED_BLOCK), 256, 16, 1)]

        def unpacked(self) -> torch.Tensor:
            scales = torch.empty(self._absmax.shape, device=self.weight.device)
            weight = torch.empty(
                self.out_features, self.in_features, dtype=self.compute_dtype, device=self.weight.device
            )
            del scales
            return weight

        def packed_numel(self) -> int:
            return int(self.weight.numel())

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            bias = self.bias if self.bias is None else self.bias.to(self.compute_dtype)
            lowered = inputs.to(self.compute_dtype)  # `Linear4bit.forward` holds it until its result is cast back
            return _Product.apply(lowered, bias, self).to(inputs.dtype)

    return Nf4Linear


@functools.cache
def _gptq_class() -> Any:
    class GptqLinear(nn.Linear):
        def __init__(self, linear: Any, compute_dtype: torch.dtype, storage: torch.dtype, group: int) -> None:
            nn.Module.__init__(self)
            inputs, outputs = self.in_features, self.out_features = _shape(linear)
            self.bias = linear.bias
            self.compute_dtype = compute_dtype
            groups = 1 if group == -1 else math.ceil(inputs / group)
            empty = functools.partial(torch.empty, device=linear.weight.device)
            # Sharded parameters must be floating point, so what is packed is then seen as `storage`.
            packed = torch.int32 if storage == torch.uint8 else storage
            for name, words in (("weight", inputs // 8 * outputs), ("qzeros", groups * outputs // 8)):
                values = empty(words * 4 // packed.itemsize, dtype=packed)
                self.register_parameter(name, nn.Parameter(values, requires_grad=False))
            self.register_buffer("scales", empty(groups, outputs, dtype=torch.float16), persistent=False)
            self.register_buffer("g_idx", empty(inputs, dtype=torch.int32), persistent=False)

        def unpacked(self) -> torch.Tensor:
            return torch.empty(self.in_features, self.out_features, dtype=torch.float16, device=self.weight.device).t()

        def packed_numel(self) -> int:
            return int(self.weight.numel() + self.qzeros.numel())

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = _Product.apply(inputs, None, self).half()
            return output if self.bias is None else output + self.bias

    return GptqLinear


def adapters_of_packed() -> dict[type, type]:
    """Return which class of peft adapts which layer, for those that peft does not recognise by themselves."""
    gptq: Any = importlib.import_module("peft.tuners.lora.gptq")
    return {_gptq_class(): getattr(gptq, "GPTQLoraLinear", None) or gptq.QuantLinear}

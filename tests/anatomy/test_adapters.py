"""Adapters are chosen and counted as peft does (issue 3, anatomy: LoRA), 4-bit matrices as bitsandbytes stores them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from small_models import SMALL, build, describe

from trainwright.anatomy.adapters import Lora, adapter_parameters, adapters
from trainwright.anatomy.quantized import nf4_bytes, quantized_matrices
from trainwright.errors import UserError

TASK_TYPES = {"t5": "SEQ_2_SEQ_LM", "bert": None, "vit": None}


def peft_shapes(raw: dict[str, Any], r: int, targets: str | list[str]) -> list[int]:
    """Sizes of all trained parameters after peft has put its adapters in."""
    config = LoraConfig(r=r, target_modules=targets, task_type=TASK_TYPES.get(raw["model_type"], "CAUSAL_LM"))
    model = get_peft_model(build(raw), config)
    return sorted(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def our_shapes(raw: dict[str, Any], r: int, targets: str | list[str]) -> list[int]:
    chosen = adapters(describe(raw), Lora(r, targets)).values()  # type: ignore[arg-type]
    return sorted(
        size for one in chosen for size in (one.copies * one.rank * one.rows, one.copies * one.rank * one.columns)
    )


@pytest.mark.parametrize("name", SMALL)
def test_all_linear_adapts_what_peft_adapts(name: str) -> None:
    assert our_shapes(SMALL[name], 4, "all-linear") == peft_shapes(SMALL[name], 4, "all-linear")


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ["q_proj", "v_proj"]),
        ("llama", ["q_proj", "lm_head"]),
        ("llama", ["embed_tokens", "o_proj"]),
        ("llama", ["model.layers.0.self_attn.q_proj", "layers.2.mlp.up_proj"]),
        ("gpt2", ["c_attn", "wte"]),
        ("gpt2", ["mlp.c_proj"]),
        ("phi3", ["qkv_proj", "gate_up_proj"]),
        ("t5", ["q", "v"]),
        ("bert", ["query", "dense"]),
        ("vit", ["projection", "classifier"]),
        ("gpt_neox", ["query_key_value"]),
        ("mixtral", ["q_proj", "v_proj"]),
        ("mixtral", ["w1", "w2", "w3"]),
        ("mixtral", ["gate", "k_proj"]),
        ("qwen2_moe", ["gate_proj", "up_proj"]),
        ("qwen3_moe", ["gate_proj", "up_proj", "down_proj"]),
        ("qwen3_moe", ["experts.down_proj"]),
    ],
)
def test_named_targets_adapt_what_peft_adapts(name: str, targets: list[str]) -> None:
    assert our_shapes(SMALL[name], 8, targets) == peft_shapes(SMALL[name], 8, targets)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ["c_attn"]),
        ("llama", ["self_attn"]),
        ("llama", ["q_proj", "norm"]),
        ("mixtral", ["w1"]),
        ("mixtral", ["gate_proj", "up_proj", "down_proj"]),
        ("qwen2_moe", ["gate"]),
        ("qwen3_moe", ["up_proj"]),
    ],
)
def test_targets_that_peft_refuses_are_refused_with_the_names_that_exist(name: str, targets: list[str]) -> None:
    with pytest.raises(ValueError, match="arget"):
        peft_shapes(SMALL[name], 8, targets)
    with pytest.raises(UserError, match=r"method\.targets") as caught:
        adapters(describe(SMALL[name]), Lora(8, targets))
    assert caught.value.hints


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.sampled_from(sorted(SMALL)))
def test_adapters_grow_with_the_rank_alone(r: int, name: str) -> None:
    assert adapter_parameters(describe(SMALL[name]), Lora(r)) == r * adapter_parameters(describe(SMALL[name]), Lora(1))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90).map(lambda n: 2 * n))
def test_a_4_bit_matrix_takes_the_bytes_that_bitsandbytes_allocates(rows: int, columns: int) -> None:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(torch.randn(rows, columns), blocksize=64, compress_statistics=True, quant_type="nf4")
    tensors = (packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
    assert nf4_bytes(rows * columns) == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("name", SMALL)
def test_the_matrices_that_transformers_loads_in_4_bits_are_known(name: str) -> None:
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    model = build(SMALL[name])
    skipped = Bnb4BitHfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    replaced = replace_with_bnb_linear(model, modules_to_not_convert=skipped, quantization_config=config)
    real = {
        path: module.in_features * module.out_features
        for path, module in replaced.named_modules()
        if isinstance(module, bnb.nn.Linear4bit)
    }
    assert quantized_matrices(describe(SMALL[name])) == real

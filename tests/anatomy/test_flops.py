"""FLOPs from a config alone are those that torch counts in a real step (issue 3, anatomy)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from small_models import SMALL, build, describe
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from trainwright.anatomy.adapters import Lora
from trainwright.anatomy.flops import ForwardInput, StepFlops, step_flops

BATCH = ForwardInput(samples=2, length=32, source_length=24)


def flash_forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """torch's own formula for the kernels of GPUs."""
    return sdpa_flop_count(query, key, value)


def flash_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """torch's own formula for the kernels of GPUs."""
    return sdpa_backward_flop_count(gradient, query, key, value)


FLASH_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flash_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: flash_backward,
}
"""torch counts the flash attention of GPUs, but not that of the CPU, which computes the same products."""


def counted(
    raw: dict[str, Any], prepare: Callable[[Any], Any] | None = None, *, attention: str = "eager"
) -> tuple[int, int]:
    """FLOPs of the forward and the backward pass of a real step on the CPU, as torch counts them.

    On the CPU and not on the meta device, where transformers' masks ask for values.
    """
    model = build(raw, device="cpu", attn_implementation=attention)
    if hasattr(model, "set_experts_implementation"):
        # The grouped kernels of the other implementations are not counted on a CPU.
        model.set_experts_implementation("eager")
    model = prepare(model) if prepare else model
    model.train()
    batch = _inputs(raw)
    with FlopCounterMode(display=False, custom_mapping=FLASH_ON_CPU) as counter:
        loss = model(**batch).loss
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward


def _inputs(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    ids = torch.randint(10, 500, (BATCH.samples, BATCH.length))
    match raw["model_type"]:
        case "vit":
            size, labels = raw["image_size"], torch.zeros(BATCH.samples, dtype=torch.long)
            return {"pixel_values": torch.randn(BATCH.samples, 3, size, size), "labels": labels}
        case "t5":
            return {"input_ids": torch.randint(10, 500, (BATCH.samples, BATCH.source_length)), "labels": ids}
        case "gemma3":
            return {"input_ids": ids, "labels": ids, "token_type_ids": torch.zeros_like(ids)}
        case _:
            return {"input_ids": ids, "labels": ids}


def assert_same(ours: StepFlops, real: tuple[int, int]) -> None:
    """Equal to the last operation."""
    forward, backward = sum(ours.forward.values()), sum(ours.backward.values()) + sum(ours.recompute.values())
    assert (forward, backward) == real


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def with_lora(targets: str | list[str]) -> Callable[[Any], Any]:
    return lambda model: get_peft_model(model, LoraConfig(r=4, target_modules=targets))


@pytest.mark.parametrize("name", SMALL)
def test_harm_16_attention_is_eager_where_transformers_has_no_other(name: str) -> None:
    assert describe(SMALL[name]).family.attention_is_eager == (not build(SMALL[name])._supports_sdpa)


@pytest.mark.parametrize("name", SMALL)
def test_full_training(name: str) -> None:
    assert_same(step_flops(describe(SMALL[name]), BATCH, kernel="eager"), counted(SMALL[name]))


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_full_training_with_checkpointing(name: str) -> None:
    ours = step_flops(describe(SMALL[name]), BATCH, kernel="eager", checkpointing=True)
    assert_same(ours, counted(SMALL[name], checkpointed))


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_lora_on_all_linears(name: str) -> None:
    """No gradient of frozen weights, none of the inputs of the first layer, both of the adapters."""
    ours = step_flops(describe(SMALL[name]), BATCH, kernel="eager", lora=Lora(4))
    assert_same(ours, counted(SMALL[name], with_lora("all-linear")))


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_lora_with_checkpointing(name: str) -> None:
    ours = step_flops(describe(SMALL[name]), BATCH, kernel="eager", lora=Lora(4), checkpointing=True)
    prepare = with_lora("all-linear")
    assert_same(ours, counted(SMALL[name], lambda model: checkpointed(prepare(model))))


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ["q_proj"]),
        ("llama", ["v_proj"]),
        ("llama", ["layers.1.mlp.down_proj"]),
        ("llama", ["embed_tokens"]),
        ("llama", ["lm_head"]),
        ("gpt2", ["c_fc"]),
        ("phi", ["fc2"]),
        ("gpt_neox", ["dense_h_to_4h"]),
        ("t5", ["EncDecAttention.q"]),
        ("t5", ["EncDecAttention.k"]),
        ("mixtral", ["w2"]),
        ("mixtral", ["gate"]),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_on_some_modules(name: str, targets: list[str], checkpointing: bool) -> None:
    ours = step_flops(describe(SMALL[name]), BATCH, kernel="eager", lora=Lora(4, targets), checkpointing=checkpointing)
    adapt = with_lora(targets)
    assert_same(ours, counted(SMALL[name], (lambda model: checkpointed(adapt(model))) if checkpointing else adapt))


@pytest.mark.parametrize(
    ("name", "freeze"),
    [
        ("llama", ["model.embed_tokens.*"]),
        ("llama", ["model.embed_tokens.*", "model.layers.0.*"]),
        ("llama", ["*_proj.weight"]),
        ("qwen2", ["lm_head.*"]),
        ("gpt2", ["transformer.wte.*", "transformer.wpe.*", "transformer.h.0.*", "transformer.h.1.ln_1.*"]),
        ("t5", ["shared.*"]),
        ("t5", ["encoder.*", "shared.*"]),
        ("t5", ["decoder.*", "shared.*"]),
        ("vit", ["vit.embeddings.*"]),
        ("bert", ["bert.embeddings.*", "bert.encoder.layer.0.*"]),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_parts(name: str, freeze: list[str], checkpointing: bool) -> None:
    from trainwright.train.models import _freeze

    def prepare(model: Any) -> Any:
        _freeze(model, freeze)
        return checkpointed(model) if checkpointing else model

    ours = step_flops(describe(SMALL[name]), BATCH, kernel="eager", freeze=freeze, checkpointing=checkpointing)
    assert_same(ours, counted(SMALL[name], prepare))


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen3", "gpt2 without dropout", "gpt_bigcode", "phi", "vit", "bert"]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_attention_computes_the_scores_again(name: str, checkpointing: bool) -> None:
    raw = {**SMALL[name], "attention_probs_dropout_prob": 0.0}
    ours = step_flops(describe(raw), BATCH, kernel="fused", checkpointing=checkpointing)
    assert_same(ours, counted(raw, checkpointed if checkpointing else None, attention="sdpa"))


@pytest.mark.parametrize("name", ["mistral", "qwen2 windowed", "gemma3_text", "llama", "bert", "t5"])
def test_skipped_pairs_are_those_that_the_mask_hides(name: str) -> None:
    """The masks are the model's own: what its attention gives no weight."""
    model = build(SMALL[name], device="cpu", attn_implementation="eager").eval()
    with torch.no_grad():
        inputs = _inputs(SMALL[name]) | ({"input_ids": torch.full((2, 24), 9)} if name == "t5" else {})
        inputs.pop("labels")
        if name == "t5":
            inputs["decoder_input_ids"] = torch.full((2, 32), 9)
        output = model(**inputs, output_attentions=True)
    seen = [*output.attentions] if name != "t5" else [*output.encoder_attentions, *output.decoder_attentions]
    seen += [*output.cross_attentions] if name == "t5" else []
    pairs_x_heads = sum(int((weights > 0).sum()) for weights in seen)
    head_dim = SMALL[name].get("head_dim") or SMALL[name].get("d_kv") or 16
    ours = step_flops(describe(SMALL[name]), BATCH, masked="skipped")
    assert ours.forward["attention"] == 4 * head_dim * pairs_x_heads


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 64), st.integers(1, 4096), st.sampled_from(["llama", "gemma2", "t5", "qwen2_moe", "gpt_neox"]))
def test_flops_grow_with_the_samples_alone(samples: int, length: int, name: str) -> None:
    ours = describe(SMALL[name])
    one, many = (step_flops(ours, ForwardInput(n, length, length), checkpointing=True) for n in (1, samples))
    assert many.total == samples * one.total


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(set(SMALL) - {"mixtral", "qwen3_moe"})), st.integers(1, 512))
def test_adapters_cost_less_than_full_training_and_checkpointing_at_most_one_forward(name: str, length: int) -> None:
    ours, batch = describe(SMALL[name]), ForwardInput(2, length, length)
    full, kept = step_flops(ours, batch), step_flops(ours, batch, checkpointing=True)
    assert kept.without_recompute == full.total
    assert 0 < sum(kept.recompute.values()) <= sum(kept.forward.values())
    frozen = step_flops(ours, batch, lora=Lora(1))
    assert sum(frozen.backward.values()) < sum(full.backward.values())


def test_a_full_step_of_a_7b_model_is_six_operations_for_each_weight_and_token() -> None:
    """The rule of thumb, which leaves out attention, holds for what it describes: matrices, no embedding table."""
    from trainwright.anatomy import anatomy
    from trainwright.anatomy.catalog import config_of

    ours = anatomy(config_of("Qwen/Qwen2.5-7B"))
    step = step_flops(ours, ForwardInput(1, 2048))
    without_attention = step.total - step.forward["attention"] - step.backward["attention"]
    matrices = sum(weight.rows * weight.columns for _, weight in ours.weights() if weight.is_matmul)
    assert without_attention == 6 * 2048 * matrices

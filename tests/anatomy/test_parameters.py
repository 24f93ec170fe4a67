"""Parameters from a config alone are those that transformers builds (issue 3, anatomy)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import LLAMA_LIKE, MOE, SMALL, build, describe, shapes

from trainwright.anatomy.families import FAMILIES, family
from trainwright.anatomy.parameters import parameters_by_part, segment_parameters, trainable_parameters
from trainwright.errors import UserError

NOT_BY_DEFAULTS = {"gemma3", "ministral", "hunyuan_v1_dense"}
"""A tower that no release has; heads whose size transformers knows no default of."""


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_has_the_name_and_shape_that_transformers_gives_it(name: str) -> None:
    real = shapes(build(SMALL[name]))
    ours = describe(SMALL[name])
    assert ours.parameters() == real
    assert ours.parameter_count == sum(parameter.numel() for parameter in build(SMALL[name]).parameters())


def test_every_family_is_among_the_small_models() -> None:
    assert {raw["model_type"] for raw in SMALL.values()} == set(FAMILIES)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_where_the_table_says(model_type: str) -> None:
    assert family(model_type).name == model_type


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - NOT_BY_DEFAULTS))
def test_the_defaults_of_a_family_are_those_of_transformers(family: str) -> None:
    assert describe({"model_type": family}).parameters() == shapes(build({"model_type": family}))


@pytest.mark.parametrize("name", SMALL)
def test_parts_are_counted_where_the_modules_say_they_belong(name: str) -> None:
    model, ours = build(SMALL[name]), describe(SMALL[name])
    counted = parameters_by_part(ours)
    assert sum(counted.values()) == ours.parameter_count
    modules = dict(model.named_modules())
    expected = dict.fromkeys(("norm", "bias", "experts"), 0)
    for path, parameter in model.named_parameters():
        module = type(modules[path.rpartition(".")[0]]).__name__
        if "vision" in path or "multi_modal" in path:
            continue
        if "Norm" in module:
            expected["norm"] += parameter.numel()
        elif path.endswith("bias"):
            expected["bias"] += parameter.numel()
        elif module.endswith("Experts"):
            expected["experts"] += parameter.numel()
    if SMALL[name]["model_type"] != "gemma3":
        assert {part: counted.get(part, 0) for part in expected} == expected  # type: ignore[call-overload]
    layers = [module for path, module in model.named_modules() if path in {layer.prefix for layer in ours.layers}]
    real_layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    assert sorted(map(segment_parameters, ours.layers)) == sorted(real_layers)


@pytest.mark.parametrize(
    ("name", "freeze"),
    [
        ("t5", ["shared.*"]),
        ("t5", ["encoder.*"]),
        ("t5", ["lm_head.*", "*.layer_norm.*"]),
        ("gpt2", ["lm_head.*"]),
        ("bert", ["cls.predictions.decoder.bias", "bert.embeddings.*"]),
        ("llama", ["model.layers.[01].*"]),
        ("qwen2", ["lm_head.weight"]),
    ],
)
def test_frozen_patterns_leave_what_the_worker_would_train(name: str, freeze: list[str]) -> None:
    from trainwright.train.models import _freeze

    model = build(SMALL[name])
    _freeze(model, freeze)
    left = {path: tuple(p.shape) for path, p in model.named_parameters() if p.requires_grad}
    assert trainable_parameters(describe(SMALL[name]), freeze) == left
    assert len(left) < len(dict(model.named_parameters()))


def test_a_pattern_without_a_match_names_parameters_that_exist() -> None:
    with pytest.raises(UserError, match="matches no parameter") as caught:
        trainable_parameters(describe(SMALL["llama"]), ["encoder.*"])
    assert "model." in caught.value.hints[0]
    with pytest.raises(UserError, match="no parameter is left"):
        trainable_parameters(describe(SMALL["llama"]), ["*"])


def test_a_loaded_t5_v1_1_has_an_output_matrix_of_its_own(tmp_path: Any) -> None:
    """transformers 5 ties a fresh one, whatever the config says, but not one whose checkpoint brings the matrix."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSeq2SeqLM

    from trainwright.anatomy import anatomy, read_config

    raw = {**SMALL["t5 gated"], "tie_word_embeddings": False}
    fresh = build(raw, device="cpu")
    fresh.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = torch.ones_like(weights["shared.weight"])
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert anatomy(read_config(raw)).parameters() == shapes(loaded)
    assert anatomy(read_config(raw, from_scratch=True)).parameters() == shapes(fresh)


@st.composite
def dimensions(draw: st.DrawFn) -> dict[str, Any]:
    """Random shapes of families that have most of the switches."""
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3", "gemma2", "phi3", "mixtral", "qwen2_moe", "qwen3_moe"]))
    groups, repeats = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads = groups * repeats
    raw = {
        "model_type": family,
        "vocab_size": draw(st.integers(40, 300)),
        "hidden_size": heads * draw(st.sampled_from([8, 16, 24])),
        "intermediate_size": draw(st.integers(8, 200)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    if family not in ("phi3", "qwen2"):
        raw["head_dim"] = draw(st.sampled_from([8, 16, 32]))
    if "moe" in family:
        raw |= {**MOE, "num_experts": draw(st.integers(2, 5)), "decoder_sparse_step": draw(st.integers(1, 2))}
        raw["mlp_only_layers"] = draw(st.lists(st.integers(0, 3), max_size=2))
    if family == "mixtral":
        raw["num_local_experts"] = draw(st.integers(2, 5))
    return raw


@settings(max_examples=60, deadline=None)
@given(dimensions())
def test_random_dimensions_give_the_same_parameters(raw: dict[str, Any]) -> None:
    assert describe(raw).parameters() == shapes(build(raw))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60))
def test_parameters_grow_by_the_same_number_with_each_layer(layers: int, more: int) -> None:
    """Layers are alike, so that a reduced model and one layer tell the full one."""
    few, many = ({**LLAMA_LIKE, "model_type": "qwen3", "num_hidden_layers": n} for n in (layers, layers + more))
    ours = describe(few)
    per_layer = segment_parameters(ours.layers[0])
    assert describe(many).parameter_count == ours.parameter_count + more * per_layer

"""A family's record says what transformers builds and runs, and nobody else knows a family by its name."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from small_models import SMALL, build, describe
from torch import nn

import trainwright
from trainwright.anatomy.families import FAMILIES, family
from trainwright.anatomy.family import Family, LayerKind
from trainwright.anatomy.parts import Attention

SOURCES = Path(trainwright.__file__).parent
READERS = ("estimate/closed", "estimate/time", "plan", "job", "anatomy")


@pytest.mark.parametrize("room", READERS)
def test_a_family_is_known_by_its_record_not_by_its_name(room: str) -> None:
    """In code, that is; a docstring may name an example."""
    found = [
        f"{path.relative_to(SOURCES)}:{node.lineno}: {node.value}"
        for path in (SOURCES / room).rglob("*.py")
        if path.parent != SOURCES / "anatomy/families"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in FAMILIES
    ]
    assert not found


def record(name: str) -> Family:
    return family(SMALL[name]["model_type"])


def layers(name: str, model: nn.Module) -> list[nn.Module]:
    """Those of the language model; nothing is known of a tower beside it but its weights."""
    paths = [layer.prefix for layer in describe(SMALL[name]).layers if "vision" not in layer.prefix]
    return [model.get_submodule(path) for path in paths]


def norms_of(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for layer in layers(name, model):
        for path, module in layer.named_modules():
            if "norm" in type(module).__name__.lower():
                yield path, module


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_record_describes_the_version_that_is_installed(model_type: str) -> None:
    assert transformers.__version__.startswith(f"{family(model_type).transformers}.")


@pytest.mark.parametrize("name", SMALL)
def test_attention_is_what_transformers_takes(name: str) -> None:
    model, ours = build(SMALL[name]), record(name)
    assert (model.config._attn_implementation == "eager") == ours.attention_is_eager
    text = model.config.get_text_config()
    capped = (getattr(text, "attn_logit_softcapping", None), getattr(text, "final_logit_softcapping", None))
    assert all(capped) == any(capped) == ours.softcapped
    turns = any("RotaryEmbedding" in type(module).__name__ for module in model.modules())
    assert turns == (ours.positions == "rotary")
    attentions = [part for layer in describe(SMALL[name]).layers for part in layer.operations]
    assert any(part.rotary for part in attentions if isinstance(part, Attention)) == turns


@pytest.mark.parametrize("name", SMALL)
def test_norms_are_of_the_kind_and_where_the_record_says(name: str) -> None:
    """What a norm does with a scale of zero and with an input in bf16 tells its kind; its name, where it stands."""
    ours, model = record(name), build(SMALL[name], device="cpu")
    found = list(norms_of(name, model))
    assert found
    for path, module in found:
        assert (ours.norm == "layer") == isinstance(module, nn.LayerNorm), path
        width = module.weight.shape[0]
        scale = nn.Parameter(torch.zeros(width))
        module.weight = scale
        if ours.norm != "layer":
            assert bool(module(torch.ones(2, width)).any()) == (ours.norm == "rms_of_one_more"), path
            widened = module(torch.ones(2, width, dtype=torch.bfloat16)).dtype == torch.float32
            assert widened == (ours.norm == "rms"), path
    expected = {at for at in dataclasses.astuple(ours.norms) if at is not None}
    if ours.head_norms is not None:
        expected |= {f"self_attn.{at}" for at in (ours.head_norms.query, ours.head_norms.key)}
    of_heads = {"self_attn.q_layernorm", "self_attn.k_layernorm"}  # Phi's, as the config says
    of_one = {path for path, module in norms_of(name, model) if "layer.2" not in path}
    assert expected - {"layer.1.layer_norm"} <= of_one
    assert of_one - expected - of_heads <= {"layer.1.layer_norm"}


@pytest.mark.parametrize("name", SMALL)
def test_norms_are_registered_where_the_record_says(name: str) -> None:
    for layer in layers(name, build(SMALL[name])):
        first = next(module for module in layer.modules() if list(module.parameters(recurse=False)))
        assert ("norm" in type(first).__name__.lower()) == record(name).norms_registered_first


@pytest.mark.parametrize("name", SMALL)
def test_activations_and_what_is_kept_in_fp32_are_those_of_the_model(name: str) -> None:
    ours, model = record(name), build(SMALL[name])
    kinds = {type(module).__name__ for module in model.modules()}
    assert ("BloomGelu" in kinds) == (ours.activation == "bloom_gelu")
    if ours.layer != "T5Block":
        assert ("NewGELUActivation" in kinds) == (ours.activation == "new_gelu")
    assert set(model._keep_in_fp32_modules or ()) == set(ours.kept_in_fp32)


def test_the_kinds_of_layers_are_classes_of_transformers() -> None:
    built = {type(module).__name__ for raw in SMALL.values() for module in build(raw).modules()}
    assert built >= set(get_args(LayerKind))
    assert {family(name).layer for name in FAMILIES} == set(get_args(LayerKind))


def test_further_names_are_names_of_shared_tensors() -> None:
    for name in ("t5", "bert"):
        model: Any = build(SMALL[name])
        tensors = dict(model.named_parameters(remove_duplicate=False))
        for other, owner in record(name).further_names.items():
            assert tensors[other] is tensors[owner]

"""The bundled models have the parameters that are published, and that transformers builds (issue 3, anatomy)."""

from __future__ import annotations

import pytest
from small_models import build, shapes

from trainwright.anatomy import anatomy, read_config
from trainwright.anatomy.catalog import catalog, config_of, find
from trainwright.anatomy.families import FAMILIES
from trainwright.errors import ExitCode, UserError

MODELS = catalog().models
ISSUE_NAMES = [
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-30B-A3B",
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-1B",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mistral-Nemo-Base-2407",
    "mistralai/Mixtral-8x22B-v0.1",
    "google/gemma-2-9b-it",
    "google/gemma-3-4b-it",
    "microsoft/phi-2",
    "microsoft/Phi-3.5-mini-instruct",
    "microsoft/phi-4",
    "gpt2",
    "EleutherAI/pythia-1.4b",
    "EleutherAI/gpt-neox-20b",
    "bigcode/starcoder",
    "bigcode/starcoder2-7b",
    "bigcode/gpt_bigcode-santacoder",
    "mosaicml/mpt-7b",
    "t5-small",
    "google/flan-t5-xxl",
    "bert-large-uncased",
    "google/vit-large-patch16-224",
    "HuggingFaceTB/SmolLM2-135M",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
]


@pytest.mark.parametrize("name", MODELS)
def test_the_dimensions_give_the_number_of_parameters_that_is_published(name: str) -> None:
    entry = MODELS[name]
    count = anatomy(read_config(entry.config)).parameter_count
    if entry.unverified:
        assert count == pytest.approx(entry.parameters.value, rel=0.03)
        assert not entry.parameters.agrees_with(count), "it agrees: `unverified` can go"
    else:
        assert entry.parameters.agrees_with(count)


@pytest.mark.parametrize("name", ISSUE_NAMES)
def test_well_known_names_are_found_whatever_their_case(name: str) -> None:
    assert config_of(name) == config_of(name.upper())


def test_no_name_stands_twice_and_no_source_in_vain() -> None:
    names = [name.lower() for key, entry in MODELS.items() for name in (key, *entry.also)]
    assert len(names) == len(set(names))
    assert {entry.parameters.source for entry in MODELS.values()} == set(catalog().sources)


def test_every_family_has_a_model_but_those_that_others_contain() -> None:
    contained = {"ministral", "ministral3"}  # released as `mistral`, and beside a tower
    assert {entry.config["model_type"] for entry in MODELS.values()} == set(FAMILIES) - contained


@pytest.mark.parametrize(
    ("mirror", "known"),
    [
        ("unsloth/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"),
        ("unsloth/gemma-3-1b-it", "google/gemma-3-1b-it"),
        ("NousResearch/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("LLM-Research/Meta-Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
    ],
)
def test_a_mirror_has_the_dimensions_of_what_it_mirrors(mirror: str, known: str) -> None:
    assert config_of(mirror) == config_of(known)


@pytest.mark.parametrize("name", ["someone/Llama-3.2-3B-Instruct", "unsloth/Llama-3.2-3B-Instruct-bnb-4bit", "unsloth"])
def test_only_known_mirrors_of_whole_models_are_resolved(name: str) -> None:
    assert find(name) is None


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_are_those_of_transformers(name: str) -> None:
    """At full depth; on the meta device a model of 405 billion parameters takes no memory."""
    config = MODELS[name].config
    assert anatomy(read_config(config, from_scratch=True)).parameters() == shapes(build(config))


def test_an_unknown_model_is_told_with_the_nearest_names() -> None:
    assert find("Qwen/Qwen2.5-8B") is None
    with pytest.raises(UserError, match="not in the catalogue") as caught:
        config_of("Qwen/Qwen2.5-8B-Instruct")
    assert "Qwen/Qwen2.5-7B-Instruct" in caught.value.hints[0]
    assert caught.value.exit_code is ExitCode.MISSING

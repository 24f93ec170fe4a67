"""config.json is read as transformers reads it, and what cannot be described is refused (issue 3, anatomy)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_models import LLAMA_LIKE, SMALL, build, describe, shapes

from trainwright.anatomy import anatomy, read_config
from trainwright.anatomy.catalog import config_of
from trainwright.anatomy.families import FAMILIES
from trainwright.errors import ExitCode, UserError


@pytest.mark.parametrize("name", SMALL)
def test_a_saved_config_json_gives_the_same_model(name: str, tmp_path: Path) -> None:
    """What transformers writes has every field, aliases resolved, and much that is not about dimensions."""
    model = build(SMALL[name])
    model.config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert anatomy(read_config(raw, from_scratch=True)).parameters() == shapes(model)
    if raw["model_type"] != "t5":
        assert anatomy(config_of(str(tmp_path))).parameters() == shapes(model)


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "gpt2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "n_head": 2},
        {"model_type": "gpt_bigcode", "hidden_size": 64, "num_attention_heads": 4, "n_layer": 2},
        {"model_type": "bloom", "n_embed": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
        {"model_type": "mpt", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
        {"model_type": "t5", "num_hidden_layers": 2},
        {"model_type": "t5", "num_layers": 2, "hidden_size": 64, "head_dim": 8},
        {"model_type": "mixtral", **LLAMA_LIKE, "num_experts": 4},
        {"model_type": "qwen3_moe", **LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "mistral", **LLAMA_LIKE, "head_dim": None, "sliding_window": None},
        {"model_type": "llama", **LLAMA_LIKE, "num_key_value_heads": None, "head_dim": None},
        {"model_type": "qwen2", **LLAMA_LIKE, "head_dim": 24, "num_key_value_heads": None},
        {"model_type": "vit", "hidden_size": 64, "num_attention_heads": 4, "image_size": [64, 32], "patch_size": 16},
        {"model_type": "vit", "num_hidden_layers": 1, "id2label": {"0": "a", "1": "b", "2": "c"}},
        {"model_type": "gemma3_text", **LLAMA_LIKE, "sliding_window_pattern": 2},
    ],
)
def test_aliases_nulls_and_old_spellings_mean_what_they_mean_to_transformers(raw: dict[str, Any]) -> None:
    assert describe(raw).parameters() == shapes(build(raw))


def test_an_unknown_family_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match=r"`\['qwen3'\]`"):
        read_config({"model_type": ["qwen3"]})
    with pytest.raises(UserError, match="`qwen4`") as caught:
        read_config({"model_type": "qwen4"})
    text = caught.value.render()
    assert "did you mean qwen3 or qwen2?" in text
    assert all(family in text for family in FAMILIES)
    assert "traced step" in text
    with pytest.raises(UserError, match="`None` models"):
        read_config({"hidden_size": 64})


def test_all_impossible_values_are_told_at_once() -> None:
    raw = {"model_type": "llama", "hidden_size": "4096", "num_hidden_layers": 0, "vocab_size": True, "mlp_bias": 1}
    with pytest.raises(UserError, match="impossible values") as caught:
        read_config(raw)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "mlp_bias",
    ]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}, "no multiple of the 3"),
        ({"model_type": "gpt2", "n_embd": 100, "n_head": 3}, "no multiple of the 3"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "2 experts"),
        ({"model_type": "gemma2", "num_hidden_layers": 2, "layer_types": ["full_attention"]}, "names 1 layers"),
        ({"model_type": "gemma3", "vision_config": {"vision_use_head": True}}, "vision_use_head"),
    ],
)
def test_dimensions_that_contradict_each_other_are_refused(raw: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match="impossible dimensions") as caught:
        anatomy(read_config(raw))
    assert problem in caught.value.render()


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "bert", "is_decoder": True},
        {"model_type": "gpt2", "add_cross_attention": True},
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"model_type": "opt", "layer_norm_elementwise_affine": False},
    ],
)
def test_what_would_be_described_wrongly_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is not described here") as caught:
        read_config(raw)
    assert "traced step" in caught.value.hints[0]


def test_a_folder_without_a_config_and_a_broken_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json") as caught:
        config_of(str(tmp_path))
    assert caught.value.exit_code is ExitCode.MISSING
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="no JSON"):
        config_of(str(tmp_path))


def test_a_model_is_described_without_torch_numpy_or_transformers() -> None:
    code = (
        "import sys\n"
        "from trainwright.anatomy import anatomy\n"
        "from trainwright.anatomy.catalog import config_of\n"
        "from trainwright.anatomy.flops import ForwardInput, Lora, step_flops\n"
        "ours = anatomy(config_of('Qwen/Qwen2.5-7B-Instruct'))\n"
        "step_flops(ours, ForwardInput(1, 2048), lora=Lora(16))\n"
        "print(ours.parameter_count, *({'torch', 'numpy', 'transformers', 'peft'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["7615616512"]

"""Model folders that are broken, or that ask for code: an error with the file's name before anything is loaded."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright.errors import UserError
from trainwright.estimate.request import Request
from trainwright.model_folder import cut_short, read_model_config, require_safe

LLAMA = {
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 400, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
Command = Callable[..., subprocess.CompletedProcess[str]]


def weights(length: int = 64) -> bytes:
    header = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [length // 4], "data_offsets": [0, length]}})
    return len(header).to_bytes(8, "little") + header.encode() + bytes(length)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").write_bytes(weights())
    return folder


@pytest.fixture
def command(folder: Path, tmp_path: Path) -> Command:
    """Run a command of trainwright on a job of this model, in 2 GiB of memory."""
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 16)
    job = {
        "name": "x",
        "output_dir": str(tmp_path / "runs"),
        "model": {"name": str(folder)},
        "data": {"path": str(tmp_path / "rows.jsonl")},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [Path(sys.executable).with_name("trainwright"), name, tmp_path / "job.yaml", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            preexec_fn=limited,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            check=False,
        )

    return run


IMPOSSIBLE: dict[str, tuple[str, str]] = {
    "a huge vocabulary": (json.dumps(LLAMA | {"vocab_size": 10**17}), "vocab_size: "),
    "billions of layers": (json.dumps(LLAMA | {"num_hidden_layers": 2 * 10**9}), "num_hidden_layers: "),
    "billions of layers of GPT-2": (json.dumps(GPT2 | {"n_layer": 2e9}), "n_layer: "),
    "fewer layers than none": (json.dumps(GPT2 | {"n_layer": -3}), "n_layer: "),
    "text for a number": (json.dumps(LLAMA | {"hidden_size": "64"}), "hidden_size: "),
    "not a number": (json.dumps(LLAMA | {"rms_norm_eps": float("nan")}), "rms_norm_eps: "),
    "endless in a part": (json.dumps(LLAMA | {"text_config": {"x": [float("inf")]}}), "text_config.x: "),
    "nested without end": ('{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested"),
    "nested objects": ('{"a":' * 500 + "1" + "}" * 500, "a.a.a."),
    "no object": ("[1, 2]", "no JSON object"),
    "cut short": (json.dumps(LLAMA)[:50], "no JSON"),
    "no text": ("\udcff\udcfe\udc80", "no JSON"),
    "larger than any": ('{"a": "' + "a" * (17 << 20) + '"}', "larger than 16 MiB"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
@pytest.mark.parametrize("name", ["plan", "train"])
def test_harm_15_an_impossible_config_is_an_error_with_its_name(
    name: str, case: str, folder: Path, command: Command
) -> None:
    """Within seconds, in bounded memory, by plan and train alike."""
    text, complaint = IMPOSSIBLE[case]
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    done = command(name)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("Traceback") == 0
    assert str(folder / "config.json") in done.stderr and complaint in done.stderr
    assert "hint: " in done.stderr
    assert not (folder.parent / "runs").exists()


WHOLE = weights()
CUT: dict[str, bytes] = {
    "half of it": WHOLE[: len(WHOLE) // 2],
    "without its last byte": WHOLE[:-1],
    "less than a length": WHOLE[:5],
    "empty": b"",
    "a header beyond its end": (2**60).to_bytes(8, "little") + WHOLE[8:],
    "a header that is none": WHOLE[:8] + b"x" * (len(WHOLE) - 8),
    "a nested header": (200_000).to_bytes(8, "little") + b"[" * 100_000 + b"]" * 100_000,
}


@pytest.mark.parametrize("case", CUT)
def test_harm_15_truncated_weights_are_an_error_with_the_files_name(case: str, folder: Path, command: Command) -> None:
    """Of the base model, before a GPU is taken for it."""
    (folder / "model.safetensors").write_bytes(CUT[case])
    for name in ("plan", "train"):
        done = command(name)
        assert done.returncode == 4, done.stderr
        assert "Traceback" not in done.stderr
        assert str(folder / "model.safetensors") in done.stderr and "copy or download" in done.stderr


def test_whole_weights_are_no_error(folder: Path, command: Command) -> None:
    assert cut_short(folder / "model.safetensors") is None
    assert command("plan").returncode == 0


KERNELS: tuple[dict[str, Any], ...] = (
    {"_attn_implementation": "owner/kernel"},
    {"_attn_implementation_internal": "owner/kernel@main:function"},
    {"attn_implementation": {"text_config": "owner/kernel", "": "sdpa"}},
    {"text_config": {"_attn_implementation": "owner/kernel"}},
    {"layers": [{"_experts_implementation": "owner/kernel"}]},
    {"_attn_implementation": "flash_attention_2"},
    {"use_kernels": True},
)


@pytest.mark.parametrize("keys", KERNELS, ids=str)
def test_harm_15_a_config_names_no_kernel(keys: dict[str, Any], folder: Path, command: Command) -> None:
    """config.json is an input: what it would have loaded from the hub is refused wherever a model is read."""
    (folder / "config.json").write_text(json.dumps(LLAMA | keys))
    with pytest.raises(UserError, match="names code"):
        require_safe(str(folder))
    done = command("plan")
    assert done.returncode == 2 and "names code" in done.stderr, done.stderr


@pytest.mark.parametrize("value", [None, "eager", "sdpa", {"text_config": "sdpa"}], ids=str)
def test_what_is_built_in_may_stand_in_a_config(value: Any, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"_attn_implementation": value}))
    assert read_model_config(folder / "config.json")["_attn_implementation"] == value


def test_harm_15_train_evaluate_and_trace_refuse_a_kernel_alike(folder: Path, tmp_path: Path) -> None:
    """Where they load a model themselves: also one of the hub, and the base of an adapter."""
    from trainwright.estimate.trace.model import build_config
    from trainwright.evaluate.engines.engine import EngineSettings
    from trainwright.evaluate.engines.loading import load
    from trainwright.job.schema import Job
    from trainwright.train.models import build_model

    config = LLAMA | {"_attn_implementation": "owner/kernel"}
    (folder / "config.json").write_text(json.dumps(config))
    job = Job.model_validate({"name": "x", "model": {"name": str(folder)}, "data": {"path": "x.jsonl"}})
    with pytest.raises(UserError, match="names code"):
        build_model(job, auto_class="AutoModelForCausalLM", tokenizer=None, precision="fp32", on_meta=False)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    (adapter / "adapter_model.safetensors").write_bytes(weights())
    for model in (folder, adapter):
        with pytest.raises(UserError, match="names code"):
            load(EngineSettings(model=str(model), devices="cpu"))
    with pytest.raises(UserError, match="names code"):
        build_config(Request(config=config, micro_batch_size=1, sequence_length=8))


def test_harm_15_the_config_of_a_hub_model_is_read_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the hub's cache, in the revision that is asked for."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for commit, keys in (("a" * 40, {}), ("b" * 40, {"_attn_implementation": "owner/kernel"})):
        snapshot = tmp_path / "hub" / "models--owner--tiny" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(LLAMA | keys))
    require_safe("owner/tiny", "a" * 40)
    with pytest.raises(UserError, match="names code"):
        require_safe("owner/tiny", "b" * 40)


def test_harm_15_dimensions_of_a_job_have_the_same_limits(command: Command, folder: Path) -> None:
    job = json.loads((folder.parent / "job.yaml").read_text())
    dimensions = {"num_hidden_layers": 2 * 10**9}
    job["model"] = {"from_scratch": {"architecture": "llama", "dimensions": dimensions}, "tokenizer": {}}
    (folder.parent / "job.yaml").write_text(json.dumps(job))
    done = command("plan", "--gpus", "a100-80gb")
    assert done.returncode == 2 and "model.from_scratch.dimensions" in done.stderr, done.stderr

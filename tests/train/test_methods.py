"""What is trained and what is not, under each method, architecture and precision, and that the results load."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from real_runs import CompletedRun, RunTrain, WriteJob
from safetensors.torch import load_file

from trainwright.job.schema import Job
from trainwright.train.data.dataset import TokenDataset
from trainwright.train.models import build_model

STEPS = 12
ON_TWO = ("resources.ranks=2",)
FROZEN = ("model.embed_tokens.*", "model.layers.0.*")
RunOf = Callable[..., CompletedRun]


@pytest.fixture(scope="module")
def run_of(
    tmp_path_factory: pytest.TempPathFactory, write_job: WriteJob, run_train: RunTrain, base_model: Path
) -> RunOf:
    """Run the job of these arguments once: twelve steps from the same saved base, a tenth of the data held out."""
    train = {"learning_rate": 5e-3, "max_steps": STEPS}
    folder = tmp_path_factory.mktemp("methods")
    job = write_job(folder, model={"name": str(base_model)}, data={"eval_split": 0.1}, train=train)

    @cache
    def run_of(name: str, *arguments: str) -> CompletedRun:
        return run_train(job, f"name={name}", *arguments)

    return run_of


def done(run: CompletedRun) -> CompletedRun:
    assert run.exit_code == 0, run.stderr
    return run


def last_eval_loss(run: CompletedRun) -> float:
    return float(run.steps("eval")[max(run.steps("eval"))]["loss"])


def eval_loss(model: Any, run: CompletedRun) -> float:
    """Return the mean loss over the targets of the run's held-out samples, one by one, by transformers' own loss."""
    samples = TokenDataset(json.loads((run.folder / "prepared.json").read_text())["eval"]["cache"])
    total = 0.0
    model.eval()
    with torch.no_grad():
        for index in range(len(samples)):
            row = {name: torch.from_numpy(stream.astype(np.int64))[None] for name, stream in samples[index].items()}
            total += float(model(**row).loss) * int(samples.targets[index])
    return total / int(samples.targets.sum())


def assert_same_losses(run: CompletedRun, other: CompletedRun, tolerance: float) -> None:
    np.testing.assert_allclose(done(run).losses, done(other).losses, rtol=0, atol=tolerance)
    assert last_eval_loss(run) == pytest.approx(last_eval_loss(other), abs=tolerance)


@pytest.fixture(scope="module")
def lora(run_of: RunOf) -> CompletedRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # each process writes down what it imports
        return done(run_of("lora", "method.type=lora", "method.r=8", "method.merge=true"))


def test_lora_trains_adapters_alone(lora: CompletedRun, base_model: Path) -> None:
    """T-28, S4: only adapters are saved, all of them moved, and the counts printed are theirs."""
    assert lora.losses[-1] < lora.losses[0] - 0.2
    adapters = load_file(lora.folder / "final_model" / "adapter_model.safetensors")
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in adapters)
    assert all(bool(tensor.abs().sum() > 0) for tensor in adapters.values())
    assert not (lora.folder / "final_model" / "model.safetensors").exists()
    trained = sum(tensor.numel() for tensor in adapters.values())
    total = trained + sum(tensor.numel() for tensor in load_file(base_model / "model.safetensors").values())
    assert f"Parameters: {total:,} in all, {trained:,} trained" in lora.stderr


def test_an_adapter_loads_in_peft_and_keeps_its_loss(lora: CompletedRun) -> None:
    """DoD 2: one line of plain peft, and the held-out loss is that of the run's last evaluation."""
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(lora.folder / "final_model")
    assert eval_loss(model, lora) == pytest.approx(last_eval_loss(lora), abs=1e-5)


def test_a_merged_model_loads_in_transformers_and_equals_base_and_adapter(lora: CompletedRun) -> None:
    """`method.merge`: the same logits to 1e-4, without peft."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merged = AutoModelForCausalLM.from_pretrained(lora.folder / "final_model" / "merged")
    assert not hasattr(merged, "peft_config")
    adapted = AutoPeftModelForCausalLM.from_pretrained(lora.folder / "final_model")
    tokens = AutoTokenizer.from_pretrained(lora.folder / "final_model" / "merged")("How many?", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(merged(**tokens).logits, adapted(**tokens).logits, rtol=0, atol=1e-4)
    assert eval_loss(merged, lora) == pytest.approx(last_eval_loss(lora), abs=1e-5)


def test_what_a_rank_has_no_use_for_is_not_imported(lora: CompletedRun) -> None:
    """Both are installed here; peft and transformers would import them, which takes as long as the run itself.

    A line is written for a mere attempt too, for what lies within a package only once that is imported.
    """
    lines = (lora.folder / "logs" / "attempt_1" / "rank_0.log").read_text().splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert {"torch.nn", "transformers.utils", "peft.utils"} <= imported
    assert not [name for name in imported if name.startswith(("bitsandbytes.", "deepspeed."))]
    assert find_spec("bitsandbytes") and find_spec("deepspeed")


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_sharded_lora_with_recomputed_activations_learns_the_same(
    run_of: RunOf, lora: CompletedRun, strategy: str
) -> None:
    """Two ranks that each hold a part of base and adapters, with gradient checkpointing: the same losses to 1e-6."""
    sharded = ("method.type=lora", "method.r=8", f"resources.strategy={strategy}", "train.gradient_checkpointing=true")
    run = run_of(f"lora-{strategy}", *ON_TWO, *sharded)
    assert_same_losses(run, lora, 1e-6)
    adapters = [load_file(r.folder / "final_model" / "adapter_model.safetensors") for r in (run, lora)]
    assert adapters[0].keys() == adapters[1].keys()
    for name, tensor in adapters[1].items():
        torch.testing.assert_close(adapters[0][name], tensor, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def frozen(run_of: RunOf) -> CompletedRun:
    return done(run_of("frozen", f"method.freeze=[{', '.join(repr(pattern) for pattern in FROZEN)}]"))


def test_frozen_tensors_stay_as_they_are(frozen: CompletedRun, base_model: Path) -> None:
    """S2-42: tensors that a pattern names are bit-equal to the base's, all others moved."""
    base, final = (load_file(folder / "model.safetensors") for folder in (base_model, frozen.folder / "final_model"))
    assert base.keys() == final.keys()
    stay = {name for name in base if name.startswith(("model.embed_tokens.", "model.layers.0."))}
    assert len(stay) == 10
    assert {name for name in base if torch.equal(base[name], final[name])} == stay
    assert frozen.losses[-1] < frozen.losses[0] - 1


@pytest.mark.long
def test_gradient_checkpointing_changes_no_loss(run_of: RunOf, frozen: CompletedRun) -> None:
    """S4: the same losses to 1e-6, here under DDP, with frozen parts before and after trained ones."""
    freeze = f"method.freeze=[{', '.join(repr(pattern) for pattern in FROZEN)}]"
    run = run_of("frozen-recomputed", freeze, "train.gradient_checkpointing=true", *ON_TWO)
    assert "train.gradient_checkpointing = True" in run.stderr
    assert_same_losses(run, frozen, 1e-6)


@pytest.fixture(scope="module")
def qlora(run_of: RunOf) -> CompletedRun:
    return done(run_of("qlora", "method.type=qlora", "method.r=8", "eval.every=3 steps"))


def test_qlora_learns_on_a_packed_base(qlora: CompletedRun, lora: CompletedRun) -> None:
    """4-bit nf4: the loss falls, starts off that of the unpacked base, and the adapter loads in peft."""
    from peft import AutoPeftModelForCausalLM

    assert qlora.losses[-1] < qlora.losses[0] - 0.2
    assert 1e-4 < abs(qlora.losses[0] - lora.losses[0]) < 0.05
    model = AutoPeftModelForCausalLM.from_pretrained(qlora.folder / "final_model")
    assert eval_loss(model, qlora) == pytest.approx(last_eval_loss(qlora), abs=0.05)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_qlora_is_the_same_under_every_strategy(run_of: RunOf, qlora: CompletedRun, strategy: str) -> None:
    """To 1e-5, also with fewer evaluations: one must not change the packed weights for the training after it."""
    run = run_of(f"qlora-{strategy}", "method.type=qlora", "method.r=8", *ON_TWO, f"resources.strategy={strategy}")
    assert len(run.steps("eval")) < len(qlora.steps("eval"))
    assert_same_losses(run, qlora, 1e-5)


def test_nothing_left_to_train_is_an_error(run_of: RunOf) -> None:
    """T-29."""
    run = run_of("all-frozen", "method.freeze=['*']")
    assert run.exit_code == 2
    assert "no parameter is left to train" in run.stderr
    assert not run.metrics


def test_unknown_targets_are_answered_with_the_known_ones(run_of: RunOf) -> None:
    """S4: the error lists the linear modules of this very model."""
    run = run_of("unknown-targets", "method.type=lora", "method.targets=[query_key_value]")
    assert run.exit_code == 2
    assert "query_key_value" in run.stderr
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        assert name in run.stderr


@pytest.mark.long
def test_half_precision_on_the_cpu_keeps_adapters_in_fp32(run_of: RunOf, lora: CompletedRun) -> None:
    """S4-18 to S4-22, T-28: fp16 is asked for, what the CPU can do runs (bf16 where it is native), and why is said."""
    run = done(run_of("half", "method.type=lora", "method.r=8", "resources.precision=fp16"))
    found = json.loads((run.folder / "training_config.json").read_text())["found"]["precision"]
    assert found in ("bf16", "fp32")
    assert f"warning: the CPU does not train in FP16, switching to {found.upper()}" in run.stderr
    assert f"trained_dtype float32, precision {found}" in run.stderr
    assert run.losses[-1] < run.losses[0] - 0.2
    np.testing.assert_allclose(run.losses, lora.losses, rtol=0, atol=0.05)


@pytest.mark.long
def test_packing_learns_what_unpacked_training_learns(
    tmp_path: Path, write_job: WriteJob, run_train: RunTrain, base_model: Path
) -> None:
    """With all data in each step, packed and unpacked descent are one and the same: no token sees another document."""
    train = {"global_batch_size": 128, "micro_batch_size": 16, "learning_rate": 3e-3, "max_steps": 4}
    job = write_job(tmp_path, model={"name": str(base_model)}, train=train)
    plain, packed = run_train(job, "name=plain"), run_train(job, "name=packed", "data.packing=true", *ON_TWO)
    np.testing.assert_allclose(done(packed).losses, done(plain).losses, rtol=0, atol=1e-5)
    assert plain.losses[-1] < plain.losses[0] - 0.3
    counts = [json.loads((run.folder / "prepared.json").read_text())["train"] for run in (plain, packed)]
    assert counts[1]["targets"] == counts[0]["targets"]
    assert counts[1]["samples"] < 0.6 * counts[0]["samples"]


ARCHITECTURES: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}, "fsdp2"),
    "qwen2": (
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        "zero3",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tied_embeddings_stay_tied_when_sharded(
    tmp_path: Path, write_job: WriteJob, run_train: RunTrain, architecture: str
) -> None:
    """From scratch, embeddings shared with the head: sharded as alone, and the result has the run's last loss."""
    from transformers import AutoModelForCausalLM

    dimensions, strategy = ARCHITECTURES[architecture]
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if architecture == "gpt2" else {}
    scratch = {"architecture": architecture, "dimensions": dimensions | dropout}
    model = {"from_scratch": scratch, "tokenizer": {"vocab_size": 400}}
    train = {"learning_rate": 3e-3, "max_steps": STEPS}
    job = write_job(tmp_path, model=model, data={"eval_split": 0.1}, train=train)
    alone = run_train(job, "name=alone")
    sharded = run_train(job, "name=sharded", *ON_TWO, f"resources.strategy={strategy}")
    assert_same_losses(sharded, alone, 1e-5)
    assert alone.losses[-1] < alone.losses[0] - 1
    loaded = AutoModelForCausalLM.from_pretrained(sharded.folder / "final_model")
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert eval_loss(loaded, sharded) == pytest.approx(last_eval_loss(sharded), abs=1e-5)


def is_frozen(name: str) -> bool:
    return name.startswith(("shared.", "encoder."))


def unmoved(model: Any, run: CompletedRun) -> set[str]:
    """Return the names of the parameters that are bit-equal to those the run began with."""
    from transformers import AutoTokenizer

    job = Job.model_validate_json((run.folder / "resolved.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "tokenizer")
    options = {"tokenizer": tokenizer, "precision": "fp32", "on_meta": False}
    first = dict(build_model(job, auto_class="AutoModelForSeq2SeqLM", **options).named_parameters())
    return {name for name, tensor in model.named_parameters() if torch.equal(first[name], tensor)}


@pytest.mark.long
def test_t5_learns_with_its_encoder_frozen(
    tmp_path: Path, question_file: Path, write_job: WriteJob, run_train: RunTrain
) -> None:
    """S2-41, S2-42: parquet of prompt and response, Adafactor, one-cycle, shared embedding and encoder frozen.

    Two ranks learn what one does: T5's own loss is a mean over a micro-batch and would not (facts on T5).
    """
    from transformers import AutoModelForSeq2SeqLM

    rows = [json.loads(line) for line in question_file.read_text().splitlines()]
    table = {"prompt": [row["question"] for row in rows], "response": [row["answer"] for row in rows]}
    pq.write_table(pa.table(table), tmp_path / "pairs.parquet")
    dimensions = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    job = write_job(
        tmp_path,
        task="seq2seq",
        model={"from_scratch": {"architecture": "t5", "dimensions": dimensions}, "tokenizer": {"vocab_size": 400}},
        data={"path": str(tmp_path / "pairs.parquet"), "eval_split": 0.1},
        method={"freeze": ["shared.*", "encoder.*"]},
        train={
            "optim": "adafactor",
            "lr_scheduler_type": "one_cycle",
            "learning_rate": 1e-4,
            "one_cycle_div_factor": 25,
            "max_steps": 24,
        },
    )
    alone, together = run_train(job, "name=alone"), run_train(job, "name=together", *ON_TWO)
    assert_same_losses(together, alone, 1e-5)
    assert alone.losses[-1] < alone.losses[0] - 1
    rates = [record["learning_rate"] for record in alone.steps().values()]
    assert max(rates) == pytest.approx(25 * 1e-4, rel=0.01)
    model = AutoModelForSeq2SeqLM.from_pretrained(together.folder / "final_model")
    assert eval_loss(model, together) == pytest.approx(last_eval_loss(together), abs=1e-5)

    assert unmoved(model, together) == {name for name, _ in model.named_parameters() if is_frozen(name)}

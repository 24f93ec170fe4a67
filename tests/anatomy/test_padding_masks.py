"""The mask of right padding is left out where causal attention makes it void, and only there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_models import SMALL, build
from torch import nn

from trainwright.anatomy.families import FAMILIES, family
from trainwright.estimate.request import Request
from trainwright.estimate.trace.batches import make_batch
from trainwright.job.padding import needs_padding_mask
from trainwright.job.schema import Job
from trainwright.plan.estimates import request_of
from trainwright.plan.layout import Layout
from trainwright.train.tasks.causal_lm import CausalLM

DECODERS = {name: raw for name, raw in SMALL.items() if raw["model_type"] not in ("t5", "bert", "vit")}
LOOK_AHEAD = {
    "gemma3_text, both ways": SMALL["gemma3_text"] | {"use_bidirectional_attention": True},
    "llama, not causal": SMALL["llama"] | {"is_causal": False},
}
DROPOUTS = ("dropout", "attention_dropout", "attn_dropout", "activation_dropout", "hidden_dropout", "residual_dropout")


class Tokenizer:
    """All that the task asks of a tokenizer where there is no text."""

    bos_token_id, eos_token_id, pad_token_id = None, 1, 0
    bos_token = chat_template = None
    all_special_ids: tuple[int, ...] = ()
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": []}


def job(**data: Any) -> Job:
    return Job.model_validate({"name": "masks", "model": {"name": "none"}, "data": data})


def task_for(raw: dict[str, Any], *, masked: bool | None = None) -> CausalLM:
    """The workers' task as it is for this model, or with the mask given or not whatever the model."""
    task = CausalLM(job(), Tokenizer())
    task.use_config(raw if masked is None else {"model_type": "unknown" if masked else "llama"})
    return task


def samples(lengths: tuple[int, ...] = (33, 20, 7)) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(0)
    rows = [draw.integers(10, 500, length).astype(np.int32) for length in lengths]
    return [{"input_ids": row, "labels": np.where(np.arange(len(row)) > 2, row, -100)} for row in rows]


def prepared(raw: dict[str, Any]) -> nn.Module:
    """A model in fp32 with weights that tell tokens apart, in training but without dropout."""
    torch.manual_seed(0)
    model = build(raw, device="cpu", dtype=torch.float32).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in DROPOUTS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def loss_and_gradients(model: nn.Module, task: CausalLM) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    batch = task.collate(samples())
    loss = task.loss_sum(model, batch) / int((batch["labels"] != -100).sum())
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", DECODERS)
def test_harm_08_what_is_learned_is_the_same_without_the_mask(name: str) -> None:
    """Each decoder of the catalogue: loss and gradients to 1e-6, in fp32, with rows of 33, 20 and 7 tokens."""
    model = prepared(DECODERS[name])
    loss, gradients = loss_and_gradients(model, task_for({}, masked=True))
    without, without_mask = loss_and_gradients(model, task_for({}, masked=False))
    assert without == pytest.approx(loss, abs=1e-6)
    assert without_mask.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 0.01
    for key, gradient in gradients.items():
        assert float((without_mask[key] - gradient).abs().max()) < 1e-6 * max(1.0, largest), key


@pytest.mark.parametrize("name", LOOK_AHEAD)
def test_harm_08_a_model_that_looks_ahead_keeps_its_mask(name: str) -> None:
    """It would see the padding: its loss is another one without the mask."""
    raw = LOOK_AHEAD[name]
    assert needs_padding_mask(raw)
    assert "attention_mask" in task_for(raw).collate(samples())
    model = prepared(raw)
    losses = [loss_and_gradients(model, task_for({}, masked=masked))[0] for masked in (True, False)]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_harm_08_torchs_causal_attention_gets_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask it leaves the flash kernel; a model whose length exceeds its window still needs that one."""
    masks: list[bool] = []
    original = nn.functional.scaled_dot_product_attention

    def recording(*arguments: Any, attn_mask: Any = None, **more: Any) -> torch.Tensor:
        masks.append(attn_mask is not None)
        return original(*arguments, attn_mask=attn_mask, **more)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", recording)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    for name in ("llama", "opt", "qwen3_moe"):
        masks.clear()
        loss_and_gradients(prepared(DECODERS[name]), task_for(DECODERS[name]))
        assert masks and not any(masks), name
    masks.clear()
    loss_and_gradients(prepared(DECODERS["mistral"]), task_for(DECODERS["mistral"]))
    assert masks and all(masks)


def test_harm_08_families_without_a_mask_are_decoders_of_the_catalogue() -> None:
    without = {name for name in FAMILIES if family(name).does_without_padding_mask}
    assert {raw["model_type"] for raw in DECODERS.values()} - without == {"bloom", "mpt"}
    assert {raw["model_type"] for raw in DECODERS.values()} >= without
    assert all(needs_padding_mask({"model_type": name}) for name in ("t5", "bert", "lfm2", "mamba", "none such"))


@pytest.mark.parametrize("name", ["llama", "bloom", "gemma3", "gemma3_text, both ways", "packed"])
def test_harm_08_the_plan_describes_the_batch_that_the_workers_make(name: str) -> None:
    """The same inputs, mask included, in what a plan asks of the trace as in what the task collates."""
    raw = (SMALL | LOOK_AHEAD).get(name, SMALL["llama"])
    asked = job(packing=name == "packed")
    layout = Layout(
        device="cpu",
        visible_devices=None,
        ranks=1,
        strategy="single",
        precision="fp32",
        offload="none",
        global_batch_size=3,
        micro_batch_size=3,
        gradient_accumulation_steps=1,
        eval_batch_size=3,
        gradient_checkpointing=False,
    )
    request: Request = request_of(asked, raw, layout, ())
    made = make_batch(request, None, 3, pixels=torch.float32)
    rows = samples()
    if name == "packed":
        rows = [row | {"position_ids": np.arange(len(row["labels"]))} for row in rows]
    assert made.keys() == task_for(raw).collate(rows).keys()
    assert ("attention_mask" in made) == (name in ("bloom", "gemma3_text, both ways"))

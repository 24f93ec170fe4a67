"""The transformers engine on a processor, with real models of a few thousand random weights."""

from __future__ import annotations

import json
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from saved_models import bytes_tokenizer, plain_answers, save_model
from transformers import AutoTokenizer

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.engines.encoding import PromptEncoder
from trainwright.evaluate.engines.engine import EngineSettings
from trainwright.evaluate.engines.opening import choose_engine, open_engine

OPENING = "Answer the question with the number of the right choice. "
PROMPTS = [
    OPENING + ("Which unit hosts the scheduler, and why? " * repeat) + f"Is it {letter}"
    for letter, repeat in zip("ABCDEFGHIJ", (3, 0, 1, 7, 2, 0, 5, 1, 4, 2), strict=True)
]
NEW = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small qwen2."""
    return save_model(tmp_path_factory.mktemp("qwen2"))


def opened(model: Path, **settings: Any) -> Any:
    """Return the transformers engine on the processor."""
    return open_engine(EngineSettings(model=str(model), **settings))


@pytest.mark.parametrize("family", ["qwen2", "mistral", "lfm2", "gpt2"])
def test_a_batch_answers_as_transformers_does_one_by_one(family: str, tmp_path: Path) -> None:
    """Done-when 4, T-20: the same new tokens and nothing of the prompt, in the order of the prompts, in any batch."""
    folder = save_model(tmp_path / family, family)
    plain = plain_answers(folder, PROMPTS, NEW)
    for batch_size in (4, "auto"):
        answers = opened(folder, batch_size=batch_size).generate(PROMPTS, max_new_tokens=NEW)
        assert [answer.text for answer in answers] == [bytes_tokenizer().decode(tokens) for tokens, _ in plain]
        assert [answer.confidence for answer in answers] == pytest.approx([sure for _, sure in plain], abs=1e-6)
        assert [answer.prompt_tokens for answer in answers] == [len(prompt) for prompt in PROMPTS]
        assert {answer.new_tokens for answer in answers} == {NEW}
    assert len({answer.text for answer in answers}) > len(PROMPTS) // 2, "else their order would not show"


def test_the_beginning_that_prompts_share_is_computed_once_and_changes_no_logits(model: Path) -> None:
    """Issue 6 (prefix reuse): the keys and values are those that each prompt would have computed itself."""
    import torch
    from transformers import AutoModelForCausalLM

    from trainwright.evaluate.engines.prefix import Prefix

    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    beginning, rest = list(range(10, 60)), [[70, 71, 72], [80, 81, 82]]
    passes = []
    loaded.register_forward_hook(lambda *_: passes.append(1))
    prefix = Prefix(loaded)
    with torch.inference_mode():
        for _ in range(2):
            cache = prefix.cache(beginning, 2)
            reused = loaded(input_ids=torch.tensor(rest), past_key_values=cache).logits
        assert len(passes) == 3, "the beginning once, what follows twice"
        whole = loaded(input_ids=torch.tensor([beginning + tokens for tokens in rest])).logits[:, len(beginning) :]
    assert torch.allclose(reused, whole, atol=1e-5)


def test_layers_that_would_count_the_padding_reuse_no_beginning(tmp_path: Path) -> None:
    """A window and a state carried along both see the gap that unlike lengths leave."""
    import torch
    from transformers import AutoModelForCausalLM

    from trainwright.evaluate.engines.prefix import Prefix

    for family in ("mistral", "lfm2"):
        loaded = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / family, family))
        with torch.inference_mode():
            assert Prefix(loaded).cache(list(range(10, 60)), 2) is None


def test_continuous_batches_answer_as_static_ones_do(model: Path) -> None:
    """Issue 6 (continuous batching): run here on a processor, where the engine itself would not choose it."""
    from trainwright.evaluate.engines.continuous import generate_continuously, why_not_continuous

    engine = opened(model, batch_size=4)
    static = engine.generate(PROMPTS, max_new_tokens=NEW)
    assert why_not_continuous(engine._model) == "on a processor continuous ones are slower"
    found = generate_continuously(
        engine._model, engine._encoder.encode(PROMPTS, NEW), engine._generation(NEW), num_blocks=16, max_batch_tokens=64
    )
    assert found is not None
    assert [bytes_tokenizer().decode(tokens) for tokens, _ in found] == [answer.text for answer in static]


def test_an_answer_ends_where_the_model_ends_it(tmp_path: Path) -> None:
    """What follows a stop token, padding included, is no part of the answer, nor are tokens counted there."""
    [(tokens, _)] = plain_answers(save_model(tmp_path / "endless"), PROMPTS[:1], NEW)
    stop = tokens[3]
    folder = save_model(tmp_path / "ending", eos_token_id=[2, stop])
    answers = opened(folder).generate(PROMPTS, max_new_tokens=NEW)
    assert answers[0].new_tokens == tokens.index(stop)
    assert answers[0].text == bytes_tokenizer().decode(tokens[: tokens.index(stop)])


def test_what_a_model_recommends_for_sampling_is_not_followed(model: Path, tmp_path: Path) -> None:
    """A penalty on repetition counts padding, so that an answer would hang on the others in its batch."""
    recommended = {"do_sample": True, "temperature": 9.0, "top_p": 0.8, "repetition_penalty": 2.0}
    folder = save_model(tmp_path / "sampled", **recommended)
    greedy = opened(model).generate(PROMPTS, max_new_tokens=NEW)
    assert opened(folder).generate(PROMPTS, max_new_tokens=NEW) == greedy


def test_the_same_prompt_is_answered_once(model: Path) -> None:
    """Several policies ask the same of the model at the same step."""
    engine = opened(model, batch_size=4)
    batches = []
    answered = engine._batch
    engine._batch = lambda batch, *rest: (batches.append(len(batch)), answered(batch, *rest))[1]
    answers = engine.generate([PROMPTS[0], PROMPTS[1]] * 20, max_new_tokens=2)
    assert batches == [2]
    assert answers[0] == answers[2] == answers[38] and answers[1] == answers[39] and answers[0] != answers[1]
    assert engine.generate([], max_new_tokens=2) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on a process's memory is set as Linux does")
def test_where_memory_runs_out_batches_are_halved_and_answers_stay(model: Path) -> None:
    """Issue 6: a real refusal of the allocator; each prompt is answered, and the fall is told."""
    prompts = [f"{number} " + "x" * 900 for number in range(32)]
    patient = opened(model, batch_size=2).generate(prompts, max_new_tokens=2)
    engine = opened(model, batch_size=32)
    with memory_left(48 << 20):
        answers = engine.generate(prompts, max_new_tokens=2)
    assert [answer.text for answer in answers] == [answer.text for answer in patient]
    assert any(re.search(r"memory ran out with \d+ prompts at a time; from here on \d+", note) for note in engine.notes)


@contextmanager
def memory_left(size_bytes: int) -> Iterator[None]:
    """Let this process take no more than so much on top of what it has."""
    found = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(found[1]) * 1024 + size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_prompt_that_does_not_fit_alone_ends_with_what_helps(model: Path) -> None:
    """S3-28, X-13: exit code 77; fewer GPUs are no remedy where they share the layers."""
    from trainwright.evaluate.engines.loading import out_of_memory_hints

    engine = opened(model, batch_size=4)
    tries = []

    def full(batch: list[Any], *_: Any) -> None:
        tries.append(len(batch))
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    engine._batch = full
    with pytest.raises(UserError, match="not even one prompt") as caught:
        engine.generate(PROMPTS, max_new_tokens=2)
    assert tries == [4, 2, 1]
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
    assert not [hint for hint in out_of_memory_hints((0, 1)) if "fewer GPUs" in hint]
    assert any("more GPUs" in hint for hint in out_of_memory_hints((0, 1)))


def test_every_way_of_saying_that_memory_ran_out_is_known() -> None:
    """What is no lack of memory is not taken for it."""
    import torch

    from trainwright.evaluate.engines.transformers_engine import is_out_of_memory

    with pytest.raises(RuntimeError) as real:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(real.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 17 GB)"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_an_error_that_is_no_lack_of_memory_is_not_swallowed(model: Path) -> None:
    """Halving would hide it."""
    engine = opened(model)

    def broken(*_: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    engine._batch = broken
    with pytest.raises(RuntimeError, match="shapes"):
        engine.generate(PROMPTS, max_new_tokens=2)


def test_pickled_weights_are_refused(model: Path, tmp_path: Path) -> None:
    """Safetensors only, of models and of adapters: a pickle runs what is written in it."""
    import torch

    pickled = shutil.copytree(model, tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save({}, pickled / "pytorch_model.bin")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    torch.save({}, adapter / "adapter_model.bin")
    for folder in (pickled, adapter):
        with pytest.raises(UserError, match=r"safetensors") as caught:
            opened(folder)
        assert caught.value.exit_code is ExitCode.MISSING


def test_a_model_that_is_not_there_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 4, for a folder without a model and for a hub's without a network."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in (str(tmp_path), "nobody/no-such-model"):
        with pytest.raises(UserError, match=re.escape(name)) as caught:
            open_engine(EngineSettings(model=name))
        assert caught.value.exit_code is ExitCode.MISSING
        assert "HF_HUB_CACHE" in caught.value.render()


def test_layers_left_in_host_memory_are_refused() -> None:
    """S3-15: spread over what is free on the GPUs, and over nothing else in silence."""
    from trainwright.evaluate.engines.loading import _refuse_offloaded

    spread = SimpleNamespace(hf_device_map={"embed": 0, "layers.0": 1, "layers.1": "disk"})
    with pytest.raises(UserError, match="do not fit on the GPUs") as caught:
        _refuse_offloaded(spread)
    assert caught.value.exit_code is ExitCode.NO_PLAN_FITS


def test_gpus_that_torch_does_not_see_are_named(model: Path) -> None:
    """Exit code 4, before anything is loaded."""
    with pytest.raises(UserError, match="GPU 97, 98") as caught:
        open_engine(EngineSettings(model=str(model), devices=(97, 98), engine="transformers"))
    assert caught.value.exit_code is ExitCode.MISSING


def test_a_chat_template_is_applied_where_there_is_one(model: Path, tmp_path: Path) -> None:
    """And it begins the turn that is to answer; it can be left out, and cannot be had where there is none."""
    folder = shutil.copytree(model, tmp_path / "chat")
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}<|turn|>{% endfor %}model:"
    tokenizer.save_pretrained(folder)
    as_chat = opened(folder)._encoder.encode(["Hi"], 8)
    assert bytes_tokenizer().decode(as_chat[0]) == "<bos>user: Hi<|turn|>model:"
    assert bytes_tokenizer().decode(opened(folder, chat_template=False)._encoder.encode(["Hi"], 8)[0]) == "Hi"
    with pytest.raises(UserError, match="has none"):
        opened(model, chat_template=True)


def test_a_passage_cannot_end_its_own_turn(model: Path) -> None:
    """The special tokens of the model, written in a text that was retrieved, stay text."""
    [tokens] = opened(model)._encoder.encode(["a<|turn|>b<eos>"], 8)
    assert not set(tokens) & {0, 1, 2, 3}
    assert bytes_tokenizer().decode(tokens) == "a< |turn|>b< eos>"


def test_harm_13_thinking_stays_recognisable_in_the_text_of_an_answer(model: Path, tmp_path: Path) -> None:
    """Tags that are special tokens are not left out, and one that the prompt opens stands before what goes on from it.

    Without either the thought alone would be scored as the answer.
    """
    folder = shutil.copytree(model, tmp_path / "thinks")
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>", "<|channel|>", "<|message|>", "<|end|>"]})
    tokenizer.chat_template = "{{ messages[0].content }}<|turn|>model:<think>\n"
    tokenizer.save_pretrained(folder)
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(folder), "auto", 1024)

    def written(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    channels = "<|channel|>analysis<|message|>Is it 1?<|end|><|turn|>"
    assert encoder.decode([written("Is it 1?</think>4<eos>")]) == ["<think>Is it 1?</think>4"]
    assert encoder.notes == ["prompts: the tokenizer's chat template"]
    cut_off = encoder.decode([written("Is it 1?"), written(channels)])
    assert cut_off == ["<think>Is it 1?", "<think>" + channels.removesuffix("<|turn|>")]
    assert encoder.notes[1:] == [
        "2 answers ended before the model's thinking did, which is no answer: a larger max_new_tokens"
    ]
    closed = PromptEncoder(AutoTokenizer.from_pretrained(folder), False, 1024)
    assert closed.decode([written("4<|turn|>")]) == ["4"]


def test_of_a_prompt_too_long_the_end_is_kept_and_it_is_told(model: Path) -> None:
    """The question stands at the end; no long passage ends a run of many questions."""
    engine = opened(model)
    long, short = "x" * 3000 + " Which unit?", OPENING
    answers = engine.generate([long, short], max_new_tokens=24)
    assert [answer.prompt_tokens for answer in answers] == [1000, len(OPENING)]
    assert answers[0].text == engine.generate([long[-1000:]], max_new_tokens=24)[0].text
    assert "1 prompts were longer than the model reads; their beginnings were left out" in engine.notes
    with pytest.raises(UserError, match="the model reads 1024"):
        engine.generate([short], max_new_tokens=1024)


def test_settings_survive_the_way_to_a_worker() -> None:
    """They go as JSON."""
    for devices in ("cpu", "mps", (0,), (2, 3)):
        settings = EngineSettings(model="m", devices=devices, batch_size=8, chat_template=False, processes=2)
        assert EngineSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


def test_the_engine_is_chosen_with_a_reason() -> None:
    """Issue 6: vLLM where it is installed and there is a GPU; exit code 4 where it is asked for and is not there."""
    chosen = choose_engine(EngineSettings(model="m"))
    assert (chosen.value, chosen.reason) == ("transformers", "there is no NVIDIA GPU")
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        choose_engine(EngineSettings(model="m", engine="vllm"))


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 4; auto goes on without it."""
    there = {"torch", "transformers"}
    monkeypatch.setattr("trainwright.evaluate.engines.opening.find_spec", lambda name: name in there or None)
    with pytest.raises(UserError, match="needs vllm") as caught:
        choose_engine(EngineSettings(model="m", devices=(0,), engine="vllm"))
    assert caught.value.exit_code is ExitCode.MISSING
    assert choose_engine(EngineSettings(model="m", devices=(0,))).value == "transformers"
    there.add("vllm")
    assert choose_engine(EngineSettings(model="m", devices=(0,))).value == "vllm"
    assert choose_engine(EngineSettings(model="m", devices="cpu")).value == "transformers"
    there.clear()
    with pytest.raises(UserError, match="needs transformers") as caught:
        choose_engine(EngineSettings(model="m"))
    assert caught.value.exit_code is ExitCode.MISSING

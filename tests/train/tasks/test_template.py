"""How a prompt and its response become tokens, and that the trained model is asked in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainwright.errors import UserError
from trainwright.evaluate.engines.encoding import PromptEncoder
from trainwright.job.schema import Job
from trainwright.train.data.problems import RowError
from trainwright.train.tasks.causal_lm import CausalLM
from trainwright.train.tasks.seq2seq import Seq2Seq

MakeJob = Callable[..., Job]

TURN = "'<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n'"
BEGIN_ANSWER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = f"{{% for message in messages %}}{{{{ {TURN} }}}}{{% endfor %}}{BEGIN_ANSWER}"
# As Qwen2.5's: a chat without a system message gets one.
WITH_SYSTEM = "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}" + CHATML
# As Llama 2's: a space stands between the answer and the end-of-sequence token.
LLAMA_2 = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content + "
    "' [/INST]' }}{% else %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '<|im_start|>' + message.content + '<|im_end|>' }}"
    "{% else %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% endif %}{% endfor %}"
)
# As Qwen3's: the thoughts of an answer are read apart and written again, empty ones where there are none.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% set content = message.content %}"
    "{% if message.role == 'assistant' %}{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ content + '<|im_end|>\\n' }}{% endfor %}"
    + BEGIN_ANSWER
)
FORGETS = CHATML.replace("message.content", "message.content.split('</think>')[-1]")
SPECIAL = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture
def chat_tokenizer(tokenizer: Any) -> Callable[[str | None], Any]:
    def make(template: str | None) -> Any:
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
        tokenizer.chat_template = template
        return tokenizer

    return make


def encoded(job: Job, tokenizer: Any, prompt: str, response: str) -> tuple[list[int], str]:
    """Return the tokens of a pair, and the text of those that are learned."""
    sample = CausalLM(job, tokenizer).encode({"prompt": prompt, "response": response})
    assert sample is not None
    assert all(label in (-100, token) for token, label in zip(sample["input_ids"], sample["labels"], strict=True))
    return sample["input_ids"], tokenizer.decode([label for label in sample["labels"] if label != -100])


@pytest.mark.parametrize(
    ("template", "response", "learned"),
    [
        (CHATML, "Paris.", "Paris.<|im_end|>"),
        (CHATML, "\n\nParis is in France.\n", "\n\nParis is in France.\n<|im_end|>"),
        (CHATML, "Zürich – 東京 🗼", "Zürich – 東京 🗼<|im_end|>"),
        (WITH_SYSTEM, "answer", "answer<|im_end|>"),
        (MARKED, "Paris.", "Paris.<|im_end|>"),
        (LLAMA_2, "Paris.", " Paris. <eos>"),
        (THINKING, "Paris.", "Paris.<|im_end|>"),
        (THINKING, "<think>\nFrance?\n</think>\n\nParis.", "<think>\nFrance?\n</think>\n\nParis.<|im_end|>"),
    ],
    ids=["chatml", "space", "characters of many bytes", "system", "marked", "llama 2", "thinks", "thought"],
)
def test_harm_07_a_pair_is_the_chat_that_its_template_makes_token_for_token(
    template: str, response: str, learned: str, chat_tokenizer: Callable[[str | None], Any], make_job: MakeJob
) -> None:
    """And the answer is learned with what ends its turn; the prompt says the same words, and they are not."""
    tokenizer = chat_tokenizer(template)
    prompt = f"{response}? Say it again."
    tokens, said = encoded(make_job(), tokenizer, prompt, response)
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    assert tokens == tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"]
    assert said == learned


@pytest.mark.parametrize(
    ("asked", "tokens_of", "learned"),
    [
        ("auto", "<bos>Hi \nthere<eos>", "there<eos>"),
        ("plain", "<bos>Hi \nthere<eos>", "there<eos>"),
        ("none", "<bos>Hi there<eos>", "there<eos>"),
        ('Q "1": {prompt}\\n\nÄ 🗼: ', '<bos>Q "1": Hi \\n\nÄ 🗼: there<eos>', "there<eos>"),
    ],
)
def test_harm_07_without_a_chat_template_something_stands_between_prompt_and_answer(
    asked: str, tokens_of: str, learned: str, tokenizer: Any, make_job: MakeJob
) -> None:
    """A line break, or what the job says; and evaluation puts a prompt to the trained model in the very same tokens."""
    job = make_job(data={"template": asked})
    tokens, said = encoded(job, tokenizer, "Hi ", "there")
    assert (tokenizer.decode(tokens), said) == (tokens_of, learned)
    task = CausalLM(job, tokenizer)
    task.needed_columns(["prompt", "response"])
    assert task.template is not None
    told = task.template.to_json()
    assert told["value"] == ("plain" if asked == "auto" else asked)
    assert told["reason"] == ("the tokenizer has no chat template" if asked == "auto" else "given")
    tokenizer.chat_template = told["chat_template"]  # as the run saves it
    [question] = PromptEncoder(tokenizer, "auto", None).encode(["Hi "], 8)
    assert tokens[: len(question)] == question
    assert len(tokens) - len(question) == len(tokenizer("there", add_special_tokens=False)["input_ids"]) + 1


def test_harm_07_a_model_with_a_chat_template_is_asked_as_it_was_trained(
    chat_tokenizer: Callable[[str | None], Any], make_job: MakeJob
) -> None:
    """What is trained plain is asked plain, although the tokenizer came with a chat template."""
    tokenizer = chat_tokenizer(CHATML)
    tokens, _ = encoded(make_job(), tokenizer, "Hi", "there")
    [question] = PromptEncoder(tokenizer, "auto", None).encode(["Hi"], 8)
    assert tokens[: len(question)] == question
    plain, _ = encoded(make_job(data={"template": "none"}), tokenizer, "Hi", "there")
    assert tokenizer.decode(plain) == "<bos>Hithere<eos>"
    task = CausalLM(make_job(data={"template": "none"}), tokenizer)
    task.needed_columns(["prompt", "response"])
    assert task.template is not None and task.template.to_json()["chat_template"] is None


def test_harm_07_an_answer_that_the_template_changes_is_refused_with_what_to_do(
    chat_tokenizer: Callable[[str | None], Any], make_job: MakeJob
) -> None:
    """A template that leaves thoughts out would have a model learn that there were none."""
    with pytest.raises(RowError, match=r"column `response`: .*rewrites an answer.*data\.template=plain"):
        encoded(make_job(), chat_tokenizer(FORGETS), "Hi", "<think>Hm.</think>there")


def test_harm_07_an_encoder_reads_the_prompt_in_the_chat_template(
    chat_tokenizer: Callable[[str | None], Any], make_job: MakeJob
) -> None:
    """Where the tokenizer has one; else prompts are as they were."""
    row: dict[str, object] = {"prompt": "Hi", "response": "there"}
    for template, prompt in ((CHATML, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), (None, "Hi<eos>")):
        tokenizer = chat_tokenizer(template)
        sample = Seq2Seq(make_job(task="seq2seq"), tokenizer).encode(row)
        assert sample is not None
        assert tokenizer.decode(sample["input_ids"]) == prompt
        assert tokenizer.decode(sample["labels"]) == "there<eos>"


def test_harm_07_a_template_that_cannot_be_is_refused(tokenizer: Any, make_job: MakeJob) -> None:
    """The tokenizer has none, or the data are no prompts and responses."""
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        CausalLM(make_job(data={"template": "chat"}), tokenizer)
    for column in ("text", "messages"):
        with pytest.raises(UserError, match=rf"is for a prompt and a response; the data has {column}"):
            CausalLM(make_job(data={"template": "plain"}), tokenizer).needed_columns([column])
    for wrong in ("chatml", "{prompt} {prompt}", "{prompt}{response}"):
        with pytest.raises(ValueError, match=r"in it once|leave `\{response\}` out"):
            make_job(data={"template": wrong})

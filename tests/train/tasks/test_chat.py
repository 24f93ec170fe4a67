"""Chats: exactly what the assistant says is learned, with real chat templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainwright.job.schema import Job
from trainwright.train.data.problems import RowError
from trainwright.train.tasks.causal_lm import CausalLM

MakeJob = Callable[..., Job]

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "Paris. And of Spain?"},
    {"role": "assistant", "content": "Madrid."},
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' %}{% if loop.first %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
# As Qwen3's: thoughts of earlier answers are left out, and the last answer gets empty ones put before it.
THINKING = (
    "{% for message in messages %}{% set content = message.content %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
    "{{ content + '<|im_end|>\n' }}{% endfor %}"
)
NO_END = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def _spans(template: str | None, chat: list[dict[str, str]], job: Job, tokenizer: Any) -> tuple[str, list[str]]:
    """Return the whole text and each learned stretch of it."""
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    sample = CausalLM(job, tokenizer).encode({"messages": chat})
    assert sample is not None
    spans: list[list[int]] = [[]]
    for label in sample["labels"]:
        if label != -100:
            spans[-1].append(label)
        elif spans[-1]:
            spans.append([])
    return tokenizer.decode(sample["input_ids"]), [tokenizer.decode(span) for span in spans if span]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["Paris.<|im_end|>", "Madrid.<|im_end|>"]),
        (LLAMA_3, ["Paris.<|eot_id|>", "Madrid.<|eot_id|>"]),
        (MARKED, ["Paris.<|im_end|>", "Madrid.<|im_end|>"]),
        (THINKING, ["Paris.<|im_end|>", "Madrid.<|im_end|>"]),
        # One token holds the space and `Paris`, as where the template's text is tokenized whole.
        (NO_END, [" Paris.", "Madrid.", "<eos>"]),
        (None, ["Paris.<eos>", "Madrid.<eos>"]),
    ],
    ids=["chatml", "llama-3", "marked", "thinking", "no end", "none"],
)
def test_only_the_assistants_words_and_their_end_are_learned(
    template: str | None, expected: list[str], make_job: MakeJob, tokenizer: Any
) -> None:
    """The user says `Paris.` too, and that is not learned."""
    text, spans = _spans(template, CHAT, make_job(), tokenizer)
    assert spans == expected
    if template is not None:
        whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
        assert text == whole + ("<eos>" if template == NO_END else "")


def test_text_without_a_template_is_as_documented(make_job: MakeJob, tokenizer: Any) -> None:
    text, _ = _spans(None, CHAT[1:3], make_job(), tokenizer)
    assert text == "<bos>User:\nCapital of France?\n\nAssistant:\nParis.<eos>"


def test_what_a_template_strips_is_found_all_the_same(make_job: MakeJob, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "  Hello.\n"}]
    text, spans = _spans(LLAMA_3, chat, make_job(), tokenizer)
    assert spans == ["Hello.<|eot_id|>"]
    assert text == tokenizer.apply_chat_template(chat, tokenize=False)


def test_an_answer_that_the_template_rewrites_is_refused(make_job: MakeJob, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>Hm.</think>Hello."}]
    with pytest.raises(RowError, match=r"rewrites an answer.*\{% generation %\}"):
        _spans(THINKING, chat, make_job(), tokenizer)


def test_a_chat_that_the_template_refuses_says_why(make_job: MakeJob, tokenizer: Any) -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user must begin') }}{% endif %}"
    with pytest.raises(RowError, match="column `messages`: the chat template refuses it: user must begin"):
        _spans(strict, CHAT, make_job(), tokenizer)


def test_loss_on_all_learns_the_users_words_too(make_job: MakeJob, tokenizer: Any) -> None:
    _, spans = _spans(CHATML, CHAT, make_job(data={"loss_on": "all"}), tokenizer)
    assert len(spans) == 1 and "Capital of France?" in spans[0]


def test_chats_without_an_answer_have_nothing_to_learn(make_job: MakeJob, tokenizer: Any) -> None:
    assert CausalLM(make_job(), tokenizer).encode({"messages": CHAT[:2]}) is None


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ("Hi", "expected a list of {role, content}, found str"),
        ([{"role": "user"}], "message 1: expected {role, content}"),
        ([CHAT[0], "Hi"], "message 2: expected {role, content}"),
        ([{"role": "user", "content": None}], r"`messages\[1\].content`: is null"),
        ([{"role": "user", "content": "\ufdd0"}], "message 1: holds U\\+FDD0"),
    ],
)
def test_what_is_no_chat_is_refused(messages: object, why: str, make_job: MakeJob, tokenizer: Any) -> None:
    with pytest.raises(RowError, match=why):
        CausalLM(make_job(), tokenizer).encode({"messages": messages})

"""What is wrong with a job is told all at once, with its place, its key and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.errors import ExitCode, UserError
from trainwright.job.loading import load_job
from trainwright.job.renamed import EXPLANATIONS
from trainwright.job.shape import JOB

MINIMAL = "name: a\nmodel: {name: gpt2}\n"

Refuse = Callable[..., UserError]


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Give a function that loads a text as job.yaml, with overrides, and returns the error that it must cause."""
    monkeypatch.chdir(tmp_path)

    def load(text: str, *overrides: str) -> UserError:
        Path("job.yaml").write_text(text)
        with pytest.raises(UserError) as caught:
            load_job("job.yaml", overrides)
        assert caught.value.exit_code is ExitCode.USAGE
        return caught.value

    return load


def test_everything_is_told_at_once_in_the_order_of_the_file(refuse: Refuse) -> None:
    error = refuse(
        "name: my run\n"
        "learning_rate: 2e-5\n"
        "model:\n"
        "  nam: gpt2\n"
        "  tokenizer: {vocab_sise: 500}\n"
        "train:\n"
        "  micro_batch_size: fast\n"
        "  drop_last: no\n"
        "  drop_last: false\n"
        "data:\n"
        "  columns: {promt: a}\n"
        "  max_length: 0\n"
        "eval:\n"
        "  every: often\n"
        "resources:\n"
        "  gpus: [0, true]\n"
        "  strategy: zero-2\n",
        "train.optim=adam",
        "nonsense",
    )
    assert error.problems == (
        "job.yaml:1:1: name: use letters, digits, `.`, `_` and `-`, at most 100 of them, the first a letter or a digit",
        "job.yaml:2:1: learning_rate: unknown key here; it belongs under `train`",
        "job.yaml:4:3: model.nam: unknown key; did you mean `name`?",
        "job.yaml:5:15: model.tokenizer.vocab_sise: unknown key; did you mean `vocab_size`?",
        "job.yaml:7:3: train.micro_batch_size: expected a whole number above 0 or `auto`, not the text `fast`",
        "job.yaml:9:3: train.drop_last: the key is given twice; first at job.yaml:8:3",
        "job.yaml:11:13: data.columns.promt: unknown key; did you mean `prompt`?",
        "job.yaml:12:3: data.max_length: expected a whole number above 0, not the number `0`",
        "job.yaml:14:3: eval.every: write an interval as `1 epoch`, `0.5 epochs` or `200 steps`",
        "job.yaml:16:13: resources.gpus[1]: expected a whole number or text, not `true`",
        "job.yaml:17:3: resources.strategy: expected one of `auto`, `single`, `ddp`, `fsdp2`, `zero1`, `zero2`, "
        "`zero3`, not the text `zero-2`; did you mean `zero2`?",
        "override: `nonsense` is not an override; write `key.path=value`",
        "override: train.optim: expected one of `adamw`, `adamw_8bit`, `adafactor`, not the text `adam`; "
        "did you mean `adamw`?",
    )
    assert error.message == "`job.yaml` is not a valid job: 13 problems"
    assert "the keys of `model.tokenizer` are vocab_size" in error.hints


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            "train: {learning_rate: '2e-5'}",
            "train.learning_rate: expected a number above 0 or `auto`, not the text `2e-5`; write a",
        ),
        ("train: {num_train_epochs: true}", "train.num_train_epochs: expected a number above 0, not `true`"),
        ("train: {seed: 3.0}", "train.seed: expected a whole number of at least 0, not the number `3.0`"),
        ("train: {drop_last: no}", "train.drop_last: expected `true` or `false`, not the text `no`; write `false`"),
        ("train:", "train: expected a mapping of `key: value`, not nothing; give it a value or remove the key"),
        ("train: 3", "train: expected a mapping of `key: value`, not the number `3`"),
        ("output_dir: 3", "output_dir: expected text, not the number `3`; put it in quotes"),
        ("task: causal", "task: task `causal` is unknown: use causal-lm, seq2seq or `module:Class`"),
        ("method: {type: lora, freeze: [a]}", "method: `freeze` has no effect with `lora`"),
        ("method: {targets: all}", "method.targets: expected `all-linear` or a list of text, not the text `all`"),
        ("train: {lr_scaling: linear}", "train: `lr_scaling` needs `lr_scaling_base`"),
        ("checkpoint: {every: 1.5 steps}", "checkpoint.every: an interval is a positive number of epochs or"),
        ("checkpoint: {every: " + "9" * 400 + " steps}", "checkpoint.every: write an interval as"),
        ("description: [a]", "description: expected text, not a list"),
        ('output_dir: "a\\nb"', "output_dir: the text must be one line, without tabs"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(refuse: Refuse, lines: str, problem: str) -> None:
    error = refuse(MINIMAL + lines + "\n")
    assert len(error.problems) == 1
    assert error.problems[0].startswith("job.yaml:3:")
    assert error.problems[0].split(": ", 1)[1].startswith(problem)


def test_no_sentence_is_pydantics(refuse: Refuse) -> None:
    error = refuse("model: {from_scratch: {dimensions: {a: [1]}}}\nresources: {gpus: {a: 1}}\ntracking: [a]\n")
    assert not re.search("Input should|validation error|Field required|Extra inputs", error.render())
    assert (
        "job.yaml:1:1: name: this key is needed: Name of the run: the folder `<output_dir>/<name>`." in error.problems
    )


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("per_device_train_batch_size", "train.micro_batch_size"),
        ("warmup_ratio", "train.warmup_steps"),
        ("fp16", "resources.precision"),
        ("bf16", "resources.precision"),
        ("save_steps", "checkpoint.every"),
        ("evaluation_strategy", "eval.every"),
        ("gpu_ids", "resources.gpus"),
        ("lora_r", "method.r"),
        ("lora_alpha", "method.alpha"),
        ("target_modules", "method.targets"),
    ],
)
@pytest.mark.parametrize("place", ["{}: 1", "train: {{{}: 1}}"])
def test_a_name_of_other_trainers_fails_and_names_the_new_key(refuse: Refuse, key: str, new: str, place: str) -> None:
    error = refuse(MINIMAL + place.format(key) + "\n")
    assert len(error.problems) == 1
    assert f"{key}: unknown key; it is `{new}`" in error.problems[0]


def test_every_explanation_names_keys_that_exist() -> None:
    full_names = {
        f"{place}.{name}".removeprefix(".") for name, places in JOB.sections_by_key.items() for place in places
    }
    for old, text in EXPLANATIONS.items():
        for quoted in re.findall(r"it is `([a-z_.0-9]+)", text):
            assert quoted in full_names, f"{old}: {quoted}"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("data: {limt: 3}", "data.limt: unknown key; did you mean `limit`?"),
        ("train: {max_length: 3}", "train.max_length: unknown key here; it belongs under `data`"),
        ("learning_rat: 3", "learning_rat: unknown key; did you mean `train.learning_rate`?"),
        ("every: 3 steps", "every: unknown key here; it belongs under `eval` or `checkpoint`"),
        ("xyzzy: 3", "xyzzy: unknown key"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_and_the_valid_names(
    refuse: Refuse, line: str, problem: str
) -> None:
    error = refuse(MINIMAL + line + "\n")
    assert [found.split(": ", 1)[1] for found in error.problems] == [problem]
    section = line.split(":")[0] if "{" in line else None
    names = JOB.sections_by_key
    valid = [name for name in names if (section or "") in names[name]]
    assert len(error.hints) == 1
    assert error.hints[0].endswith(", ".join(valid))


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("description: token hf_AbCdEfGhIjKlMnOpQrStUvWxYz", "hf_AbCd"),
        ("task_options: {key: AKIAIOSFODNN7EXAMPLE}", "AKIA"),
        ("data: {path: 'https://me:hunter2@example.com/a.jsonl'}", "hunter2"),
        ("task_options: {api_key: hunter2}", "hunter2"),
        ("seed: [hf_AbCdEfGhIjKlMnOpQrStUvWxYz]", "hf_AbCd"),
        ("train: {seed: hf_AbCdEfGhIjKlMnOpQrStUvWxYz}", "hf_AbCd"),
    ],
)
def test_a_secret_is_refused_and_never_repeated(refuse: Refuse, line: str, secret: str) -> None:
    error = refuse(MINIMAL + line + "\n")
    assert any("secret" in problem and problem.startswith("job.yaml:3:") for problem in error.problems)
    assert secret not in error.render()
    assert any("HF_TOKEN" in hint for hint in error.hints)


def test_a_secret_in_an_override_is_refused(refuse: Refuse) -> None:
    error = refuse(MINIMAL, "data.path=s3://key:hunter2@bucket/x")
    assert error.problems[0].startswith("override: data.path: this looks like a user name or password in a URL")
    assert "hunter2" not in error.render()

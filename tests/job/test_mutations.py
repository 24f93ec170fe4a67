"""A thousand broken job files: no traceback, no hang, and each error names file, line and key."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.errors import UserError
from trainwright.job.loading import load_job
from trainwright.job.preset import GUIDES, preset_text

FULL = """\
name: full-1
description: all sections
output_dir: outputs
model:
  from_scratch:
    architecture: llama
    dimensions: {hidden_size: 64, rms_norm_eps: 1e-6, tie_word_embeddings: true}
  tokenizer: {vocab_size: 1000}
task: causal-lm
data:
  path: train.jsonl
  columns: {prompt: question, response: answer}
  max_length: 256
method:
  type: lora
  r: 8
  targets:
    - q_proj
    - v_proj
train:
  global_batch_size: 16
  learning_rate: 2e-4
  max_steps: 100
eval:
  every: 0.5 epochs
checkpoint:
  every: 200 steps
  keep: 2
resources:
  gpus: [0, GPU-1234]
  precision: auto
tracking: [tensorboard]
"""
SOURCES = [FULL, *(preset_text(name) for name in GUIDES)]
KEY_LINE = re.compile(r"^( *)([a-z_]+):(.*)$")
FREE_NAMES = re.compile(r"dimensions|claims|num_(decoder_)?layers|d_model|d_ff|num_heads|d_kv|speed|time")
"""Sections in which every name is allowed, and the names in them."""

WRONG_VALUES = [
    "{}",
    "[[]]",
    "{a: {b: c}}",
    "[1, {x: y}]",
    "1e999",
    "-.inf",
    "&a [*a]",
    "!!python/object:os.system x",
    '"\\0"',
]
# fmt: off
FRAGMENTS = [
    b"\xff\xfe", b"\x00", b"\xe2\x80\xae", b"\xc2\x85", b'"\\ud800"', b'"\\U00110000"', b"<<: *x\n", b"---\n", b"...\n",
    b"\t", b"\r", b"{", b"]", b"*", b"&", b"!", b"%", b"? ", b": ", b"|\n", b'"', b"#", b"'", b"- ", b"@", b"`",
]
# fmt: on


def key_lines(lines: list[str]) -> list[int]:
    return [index for index, line in enumerate(lines) if KEY_LINE.match(line)]


def rename(rng: random.Random, text: str) -> tuple[bytes, str | None]:
    lines = text.splitlines()
    index = rng.choice(key_lines(lines))
    match = KEY_LINE.match(lines[index])
    assert match is not None
    new = match[2] + rng.choice(["x", "_", "s1", "zz"])
    lines[index] = f"{match[1]}{new}:{match[3]}"
    certain = None if FREE_NAMES.fullmatch(match[2]) else rf":{index + 1}:\d+: (\w+\.)*{new}: unknown key"
    return "\n".join(lines).encode(), certain


def duplicate(rng: random.Random, text: str) -> tuple[bytes, str | None]:
    lines = text.splitlines()
    index = rng.choice([index for index in key_lines(lines) if re.search(r": \S", lines[index])])
    match = KEY_LINE.match(lines[index])
    assert match is not None
    lines.insert(index, lines[index])
    certain = rf":{index + 2}:\d+: (\w+\.)*{match[2]}: the key is given twice; .*:{index + 1}:"
    return "\n".join(lines).encode(), certain


def wrong_value(rng: random.Random, text: str) -> tuple[bytes, str | None]:
    lines = text.splitlines()
    candidates = [index for index in key_lines(lines) if re.match(r"(  )?[a-z_]+: [^{\[\s]", lines[index])]
    index = rng.choice(candidates)
    match = KEY_LINE.match(lines[index])
    assert match is not None
    lines[index] = f"{match[1]}{match[2]}: {rng.choice(WRONG_VALUES)}"
    return "\n".join(lines).encode(), rf":{index + 1}:\d+: (\w+\.)*{match[2]}"


def delete(rng: random.Random, text: str) -> tuple[bytes, str | None]:
    lines = text.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return "".join(lines).encode(), None


def indent(rng: random.Random, text: str) -> tuple[bytes, str | None]:
    lines = text.splitlines(keepends=True)
    index = rng.randrange(len(lines))
    lines[index] = rng.choice([" ", "  ", "\t", "        "]) + lines[index]
    return "".join(lines).encode(), None


def shuffle(rng: random.Random, text: str) -> tuple[bytes, str | None]:
    lines = text.splitlines(keepends=True)
    rng.shuffle(lines)
    return "".join(lines).encode(), None


def insert(rng: random.Random, text: str) -> tuple[bytes, str | None]:
    data = text.encode()
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        data = data[:place] + rng.choice(FRAGMENTS) + data[place:]
    return data, None


def flip(rng: random.Random, text: str) -> tuple[bytes, str | None]:
    data = bytearray(text.encode())
    for _ in range(rng.randint(1, 6)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data), None


def truncate(rng: random.Random, text: str) -> tuple[bytes, str | None]:
    data = text.encode()
    return data[: rng.randrange(len(data))], None


def nest(rng: random.Random, text: str) -> tuple[bytes, str | None]:
    depth = rng.choice([5, 30, 2_000, 100_000])
    opening = rng.choice(["[", "{a: ", "- "])
    last = text.rstrip("\n").count("\n") + 2
    return f"{text.rstrip()}\ntask_options: {opening * depth}x\n".encode(), rf":{last}:\d+: " if depth > 5 else None


MUTATIONS: list[Callable[[random.Random, str], tuple[bytes, str | None]]] = [
    rename, duplicate, wrong_value, delete, indent, shuffle, insert, flip, truncate, nest,
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_hundred_broken_files_of_each_kind(
    mutation: Callable[[random.Random, str], tuple[bytes, str | None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten kinds, a hundred files each; where the mutation surely breaks the job, the error must say just that."""
    monkeypatch.chdir(tmp_path)
    file = Path("job.yaml")
    refused = 0
    for seed in range(100):
        rng = random.Random(f"{mutation.__name__} {seed}")
        data, certain = mutation(rng, rng.choice(SOURCES))
        file.write_bytes(data)
        began_s = time.process_time()
        try:
            load_job("job.yaml")
        except UserError as error:
            refused += 1
            assert_told(error, data, certain, seed)
        else:
            assert certain is None, f"seed {seed}: accepted, but must say {certain}\n{data.decode()}"
        assert time.process_time() - began_s < 2, f"seed {seed}"
    assert refused >= 10


def assert_told(error: UserError, data: bytes, certain: str | None, seed: int) -> None:
    assert error.problems, f"seed {seed}: {error.message}"
    for problem in error.problems:
        place = re.match(r"job\.yaml:(\d+):(\d+): (\S.*)", problem)
        assert place is not None, f"seed {seed}: {problem}"
        assert 1 <= int(place[1]) <= len(re.findall(rb"\r\n|\r|\n", data)) + 2, f"seed {seed}: {problem}"
        assert re.match(NO_KEY, place[3]) or re.match(r"\S.*: \S", place[3]), f"seed {seed}: {problem}"
    error.render().encode()
    if certain is not None:
        assert any(re.search(certain, problem) for problem in error.problems), (seed, certain, error.problems)


NO_KEY = (
    r"this is not YAML|the character U\+|the byte 0x|values are nested|the file is empty|the top level is no mapping|"
    r"a second document|the only directive|an escape|a key is a plain name|the text must be one line|"
    r"(a tag|the anchor|the alias) .* is not allowed"
)
"""What is wrong with a file, or with its top level, and so with no key in it."""

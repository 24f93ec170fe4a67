"""The tokenizer of a run: trained the same way each time, saved to load in one line, never without padding."""

from __future__ import annotations

import json
import random
import string
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainwright.errors import ExitCode, UserError
from trainwright.train.data.tokenizer import (
    content_sha256,
    ensure_pad_token,
    folder_sha256,
    load_tokenizer,
    save_tokenizer,
    texts_of,
    train_tokenizer,
)

_WORDS = random.Random(0)
TEXTS = [f"The {''.join(_WORDS.choices(string.ascii_letters + 'éß', k=4)) * 2} of room {n}.\n" for n in range(300)] * 2


def test_digits_stand_alone_and_all_text_comes_back() -> None:
    tokenizer = train_tokenizer(TEXTS, 400, ends_with_eos=False)
    assert [tokenizer.decode([i]) for i in tokenizer("1234", add_special_tokens=False)["input_ids"]] == list("1234")
    for text in ("Zebra 12", "unseen: 漢字 \U0001f600 \t\n ", " two  spaces "):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert len(tokenizer) == 400
    assert len(tokenizer("The room", add_special_tokens=False)["input_ids"]) == 2, "merges were learned"


@pytest.mark.parametrize(("ends_with_eos", "expected"), [(False, ["<bos>", "a"]), (True, ["a", "<eos>"])])
def test_the_saved_tokenizer_adds_what_the_task_was_trained_with(
    ends_with_eos: bool, expected: list[str], tmp_path: Path
) -> None:
    save_tokenizer(train_tokenizer(TEXTS, 300, ends_with_eos=ends_with_eos), tmp_path / "tokenizer")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert [loaded.decode([i]) for i in loaded("a")["input_ids"]] == expected
    assert (loaded.pad_token, loaded.bos_token, loaded.eos_token, loaded.unk_token) == (
        "<pad>",
        "<bos>",
        "<eos>",
        "<unk>",
    )


def test_training_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Two processes with different hash seeds and thread counts make the same tokenizer file."""
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    program = (
        "import json, sys; from pathlib import Path\n"
        "from trainwright.train.data.tokenizer import save_tokenizer, train_tokenizer\n"
        "texts = json.loads(Path('texts.json').read_text())\n"
        "save_tokenizer(train_tokenizer(texts, 420, ends_with_eos=False), Path(sys.argv[1]))\n"
    )
    for name, threads in (("a", "1"), ("b", "4")):
        environment = {"PYTHONHASHSEED": threads, "RAYON_NUM_THREADS": threads, "PATH": "/usr/bin:/bin"}
        subprocess.run([sys.executable, "-c", program, name], cwd=tmp_path, env=environment, check=True, timeout=120)
    assert folder_sha256(tmp_path / "a") == folder_sha256(tmp_path / "b")


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="at least 300"):
        train_tokenizer(TEXTS, 299, ends_with_eos=False)


def test_padding_is_eos_if_there_is_none_and_says_so() -> None:
    trained = train_tokenizer(TEXTS, 300, ends_with_eos=False)
    assert ensure_pad_token(trained) is None
    bare = PreTrainedTokenizerFast(tokenizer_object=trained.backend_tokenizer, eos_token="<eos>")
    note = ensure_pad_token(bare)
    assert note is not None and "<eos>" in note and bare.pad_token_id == bare.eos_token_id
    with pytest.raises(UserError, match="neither a pad_token nor an eos_token"):
        ensure_pad_token(PreTrainedTokenizerFast(tokenizer_object=trained.backend_tokenizer))


def test_content_follows_vocabulary_and_template() -> None:
    one, other = (train_tokenizer(TEXTS, size, ends_with_eos=False) for size in (300, 310))
    digests = {content_sha256(one), content_sha256(other)}
    one.chat_template = "{{ messages[0].content }}"
    digests.add(content_sha256(one))
    assert len(digests) == 3
    one.chat_template = None
    assert content_sha256(one) in digests


def test_a_tokenizer_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded from the folder") as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.exit_code == ExitCode.MISSING


def test_a_tokenizer_that_brings_code_is_refused_and_its_code_does_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "code.py").write_text(f"open({str(canary)!r}, 'w').write('ran')\nclass Evil: ...\n")
    config = {"auto_map": {"AutoTokenizer": ["code.Evil", None]}, "tokenizer_class": "Evil", "trust_remote_code": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
    assert not canary.exists()


def test_texts_of_a_row_are_found_at_any_depth() -> None:
    row = {"id": 3, "messages": [{"role": "user", "content": "Hi"}], "note": None, "text": "there"}
    assert list(texts_of(row)) == ["user", "Hi", "there"]

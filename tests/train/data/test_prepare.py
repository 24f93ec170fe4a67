"""`python -m trainwright.train.prepare`: data become token caches once, or a clear refusal before any training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trainwright.errors import ExitCode, UserError
from trainwright.train.data.dataset import TokenDataset
from trainwright.train.data.tokenizer import train_tokenizer
from trainwright.train.prepare import main, prepare

MakeRun = Callable[..., Path]
COMMAND = [sys.executable, "-m", "trainwright.train.prepare"]


@pytest.fixture
def token_model(tmp_path: Path) -> Path:
    """A saved model of a few weights with its tokenizer."""
    folder = tmp_path / "saved-model"
    texts = [f"What is {number} plus 4?" for number in range(40)]
    tokenizer = train_tokenizer(texts, 300, ends_with_eos=False)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    return folder


def _texts(prepared: dict[str, Any], part: str) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(prepared["tokenizer_dir"])
    data = TokenDataset(prepared[part]["cache"])
    return [tokenizer.decode(data[i]["input_ids"]) for i in range(len(data))]


def _learned(prepared: dict[str, Any], index: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(prepared["tokenizer_dir"])
    labels = TokenDataset(prepared["train"]["cache"])[index]["labels"]
    return tokenizer.decode(labels[labels != -100])


def test_rows_become_samples_with_the_answer_learned(make_run: MakeRun, questions: Path) -> None:
    run = make_run({"path": str(questions)})
    prepared = prepare(run)
    assert prepared == json.loads((run / "prepared.json").read_text())
    assert prepared["train"]["samples"] == 40 and prepared["eval"] is None
    assert _texts(prepared, "train")[3] == "<bos>What is 3 plus 4?\nIt is 7.<eos>"
    assert _learned(prepared, 3) == "It is 7.<eos>"
    data = TokenDataset(prepared["train"]["cache"])
    assert prepared["train"]["targets"] == int(data.targets.sum())
    assert prepared["train"]["tokens"] == int(data.lengths.sum())
    assert "[[It is 1.<eos>]]" in prepared["report"]["train"]["example"]


def test_harm_07_each_template_has_tokens_of_its_own_and_is_told(
    make_run: MakeRun, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No cache of one template stands for another; text has none, and says none."""
    found = {}
    for name, asked in {"left open": {}, "plain": {"template": "plain"}, "none": {"template": "none"}}.items():
        found[name] = prepare(make_run({"path": str(questions), **asked}, name=name.replace(" ", "-")))
    assert found["left open"]["data_fingerprint"] == found["plain"]["data_fingerprint"]
    assert found["none"]["data_fingerprint"] != found["plain"]["data_fingerprint"]
    assert found["left open"]["template"]["value"] == "plain"
    said = capsys.readouterr().err
    assert 'data.template = plain  (the tokenizer has no chat template): "{prompt}\\n", then the response' in said
    assert 'data.template = none  (given): "{prompt}", then the response' in said
    text = prepare(make_run({"path": str(questions), "columns": {"text": "question"}}, name="text"))
    assert text["template"] is None
    assert "data.template" not in capsys.readouterr().err


def test_a_vocabulary_that_the_texts_cannot_fill_is_said(make_run: MakeRun, questions: Path) -> None:
    prepared = prepare(make_run({"path": str(questions)}, vocab_size=5000))
    assert "fewer than the 5,000 asked for" in prepared["report"]["tokenizer"]


def test_loss_on_all_learns_the_prompt_too(make_run: MakeRun, questions: Path) -> None:
    prepared = prepare(make_run({"path": str(questions), "loss_on": "all"}))
    assert _learned(prepared, 3) == "What is 3 plus 4?\nIt is 7.<eos>"


def test_eval_split_sets_rows_aside_by_seed(make_run: MakeRun, questions: Path) -> None:
    prepared = prepare(make_run({"path": str(questions), "eval_split": 0.1}))
    train, held_out = _texts(prepared, "train"), _texts(prepared, "eval")
    assert (len(train), len(held_out)) == (36, 4) and len(set(train) | set(held_out)) == 40
    other = prepare(make_run({"path": str(questions), "eval_split": 0.1}, name="other", train={"seed": 7}))
    assert set(_texts(other, "eval")) != set(held_out)


def test_eval_path_is_read_whole_and_limit_takes_the_first(make_run: MakeRun, questions: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "eval.csv"
    held_out.write_text("question,answer\nWhy?,Because.\n")
    prepared = prepare(make_run({"path": str(questions), "eval_path": str(held_out), "limit": 5}))
    assert _texts(prepared, "eval") == ["<bos>Why?\nBecause.<eos>"]
    assert prepared["train"]["samples"] == 5


def test_packs_hold_all_tokens_and_evaluation_stays_unpacked(make_run: MakeRun, questions: Path) -> None:
    plain = prepare(make_run({"path": str(questions), "eval_split": 0.25}))
    packed = prepare(make_run({"path": str(questions), "eval_split": 0.25, "packing": True}, name="packed"))
    assert packed["train"]["samples"] < plain["train"]["samples"] == 30
    assert {k: packed["train"][k] for k in ("tokens", "targets")} == {
        k: plain["train"][k] for k in ("tokens", "targets")
    }
    assert packed["eval"]["samples"] == plain["eval"]["samples"] == 10
    assert packed["data_fingerprint"] != plain["data_fingerprint"]


def test_packing_of_seq2seq_is_refused(make_run: MakeRun, questions: Path) -> None:
    with pytest.raises(UserError, match="`seq2seq` cannot share a sequence") as caught:
        prepare(make_run({"path": str(questions), "packing": True}, task="seq2seq"))
    assert caught.value.hints == ("data.packing=false",)


def test_seq2seq_ends_prompt_and_response(make_run: MakeRun, questions: Path) -> None:
    """S2-41: the end of sequence is appended to both."""
    prepared = prepare(make_run({"path": str(questions)}, task="seq2seq"))
    assert _texts(prepared, "train")[3] == "What is 3 plus 4?<eos>"
    assert _learned(prepared, 3) == "It is 7.<eos>"


NUMBER = "1234567890" * 5  # each digit is a token
LONG = [
    {"prompt": "p", "response": "r"},
    {"prompt": "p", "response": NUMBER},
    {"prompt": NUMBER, "response": "r"},
    {"prompt": "p", "response": ""},
]


@pytest.mark.parametrize(
    ("too_long", "kept", "counts"),
    [
        ("truncate", 2, {"truncated": 1, "dropped_cut_away": 1, "dropped_too_long": 0}),
        ("drop", 1, {"truncated": 0, "dropped_cut_away": 0, "dropped_too_long": 2}),
    ],
)
def test_too_long_rows_are_counted(
    too_long: str, kept: int, counts: dict[str, int], make_run: MakeRun, tmp_path: Path
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in LONG * 5))
    prepared = prepare(make_run({"path": str(path), "max_length": 16, "too_long": too_long}))
    found = prepared["report"]["train"]["counts"]
    assert found == {"rows": 20, "kept": 5 * kept, "dropped_empty": 5} | {k: 5 * v for k, v in counts.items()}
    assert TokenDataset(prepared["train"]["cache"]).lengths.max() <= 16


def test_too_long_error_names_the_lines(make_run: MakeRun, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in LONG))
    with pytest.raises(UserError) as caught:
        prepare(make_run({"path": str(path), "max_length": 16, "too_long": "error"}))
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [f"{path}:2:", f"{path}:3:"]


def _parquet(path: Path, table: dict[str, Any]) -> Path:
    pq.write_table(pa.table(table), path)
    return path


BAD_ROWS: dict[str, tuple[object, str]] = {
    "missing column": ({"question": "q"}, "column `answer`: is missing"),
    "null": ({"question": "q", "answer": None}, "column `answer`: is null"),
    "number": ({"question": 5, "answer": "a"}, "column `question`: expected text, found int"),
    "NUL": ({"question": "q", "answer": "a\0"}, "column `answer`: holds a NUL"),
    "half a surrogate pair": ({"question": "q", "answer": "\ud83d"}, "column `answer`: holds half of a surrogate"),
    "array": (["q", "a"], "expected an object"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_with_line_and_column(case: str, make_run: MakeRun, questions: Path) -> None:
    """D01."""
    row, why = BAD_ROWS[case]
    lines = questions.read_text().splitlines()
    lines[20] = json.dumps(row)
    questions.write_text("\n".join(lines))
    with pytest.raises(UserError) as caught:
        prepare(make_run({"path": str(questions)}))
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{questions}:21: ") and why in caught.value.problems[0]


def test_wrong_column_types_of_parquet_are_named_by_row(make_run: MakeRun, tmp_path: Path) -> None:
    path = _parquet(tmp_path / "rows.parquet", {"prompt": ["a", "b"], "response": [1, 2]})
    with pytest.raises(UserError) as caught:
        prepare(make_run({"path": str(path)}))
    assert caught.value.problems == tuple(
        f"{path}: row {row}: column `response`: expected text, found int" for row in (1, 2)
    )


def test_parquet_without_rows_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    empty = {name: pa.array([], pa.string()) for name in ("prompt", "response")}
    with pytest.raises(UserError, match=r"no row of .* can be used for train"):
        prepare(make_run({"path": str(_parquet(tmp_path / "rows.parquet", empty))}))


def test_nothing_to_learn_anywhere_is_refused_with_the_counts(make_run: MakeRun, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "response": ""}\n' * 3)
    with pytest.raises(UserError) as caught:
        prepare(make_run({"path": str(path)}))
    assert caught.value.problems == ("3 rows read, 0 kept, 3 dropped as there was nothing to learn",)


def test_the_command_gives_exit_code_and_problems_on_stderr(make_run: MakeRun, questions: Path, tmp_path: Path) -> None:
    questions.write_text(questions.read_text() + "broken\n")
    done = subprocess.run(
        [*COMMAND, str(make_run({"path": str(questions)}))], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == ExitCode.USAGE and done.stdout == ""
    assert f"{questions}:41: no valid JSON" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run(
        [*COMMAND, str(make_run({"path": "gone.jsonl"}))], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == ExitCode.MISSING and "gone.jsonl" in done.stderr


def test_a_second_start_reads_nothing_again(make_run: MakeRun, questions: Path) -> None:
    """It neither loads transformers nor touches the cache, and takes well under a second besides Python's start."""
    run = make_run({"path": str(questions), "eval_split": 0.1})
    before = prepare(run)
    files = {path: path.stat().st_mtime_ns for path in (run.parent / "cache").rglob("*") if path.is_file()}
    program = (
        "import sys, time; from pathlib import Path; from trainwright.train.prepare import prepare\n"
        "began = time.monotonic(); prepare(Path(sys.argv[1])); took = time.monotonic() - began\n"
        "assert not {'torch', 'transformers', 'datasets', 'pyarrow'} & sys.modules.keys(); print(took)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0
    assert prepare(run) == before
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_another_run_of_the_same_data_takes_the_same_cache(make_run: MakeRun, questions: Path) -> None:
    first, second = (prepare(make_run({"path": str(questions)}, name=name)) for name in ("one", "two"))
    assert first["train"] == second["train"] and first["data_fingerprint"] == second["data_fingerprint"]


@pytest.mark.parametrize("change", ["content", "max_length", "loss_on", "columns", "tokenizer file", "cache file"])
def test_what_changes_the_tokens_is_seen(change: str, make_run: MakeRun, questions: Path) -> None:
    data: dict[str, Any] = {"path": str(questions)}
    run = make_run(data)
    before = prepare(run)
    if change == "content":
        questions.write_text(questions.read_text().replace("What is 3", "What was 3"))
    elif change == "tokenizer file":
        (run / "tokenizer" / "tokenizer.json").unlink()
    elif change == "cache file":
        (Path(before["train"]["cache"]) / "labels.bin").unlink()
    else:
        changed = {"max_length": 15, "loss_on": "all", "columns": {"prompt": "answer", "response": "question"}}
        run = make_run(data | {change: changed[change]})
    after = prepare(run)
    if change in ("tokenizer file", "cache file"):
        assert after == before and (run / "tokenizer" / "tokenizer.json").exists()
        assert len(TokenDataset(after["train"]["cache"])) == 40
    else:
        assert after["data_fingerprint"] != before["data_fingerprint"]


def test_a_renamed_file_with_the_same_rows_is_the_same_data(make_run: MakeRun, questions: Path) -> None:
    before = prepare(make_run({"path": str(questions)}))
    moved = questions.rename(questions.with_name("moved.jsonl"))
    assert prepare(make_run({"path": str(moved)}))["data_fingerprint"] == before["data_fingerprint"]


@pytest.fixture
def many_questions(tmp_path: Path) -> Path:
    path = tmp_path / "many.jsonl"
    rows = ({"question": f"What is {a} plus {a + 1}?", "answer": f"It is {2 * a + 1}."} for a in range(60_000))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _wait_for_tokens(cache: Path, child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 0 for path in cache.glob("tokens/.unfinished-*/labels.bin")):
        assert child.poll() is None and time.monotonic() < deadline, "it ended or hung before it wrote tokens"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_stopped_half_way_it_starts_again(number: signal.Signals, make_run: MakeRun, many_questions: Path) -> None:
    run = make_run({"path": str(many_questions)})
    cache = run.parent / "cache"
    child = subprocess.Popen([*COMMAND, str(run)], stderr=subprocess.PIPE, text=True)
    _wait_for_tokens(cache, child)
    child.send_signal(number)
    assert child.stderr is not None
    said = child.stderr.read()
    child.stderr.close()
    left = list(cache.glob("tokens/.unfinished-*"))
    if number == signal.SIGTERM:
        assert child.wait() == ExitCode.STOPPED and "stopped by SIGTERM" in said and left == []
    else:
        assert child.wait() == -signal.SIGKILL and len(left) == 1
    assert not (run / "prepared.json").exists()
    prepared = prepare(make_run({"path": str(many_questions), "limit": 2000}))
    assert prepared["train"]["samples"] == 2000 and _learned(prepared, 1999) == "It is 3999.<eos>"
    assert list(cache.glob("tokens/.unfinished-*")) == []


def test_two_at_once_make_one_whole_cache(make_run: MakeRun, questions: Path) -> None:
    runs = [make_run({"path": str(questions)}, name=name) for name in ("one", "two")]
    children = [subprocess.Popen([*COMMAND, str(run)], stderr=subprocess.DEVNULL) for run in runs]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    one, two = (json.loads((run / "prepared.json").read_text()) for run in runs)
    assert one["train"] == two["train"] and one["data_fingerprint"] == two["data_fingerprint"]
    assert len(TokenDataset(one["train"]["cache"])) == 40


def test_a_full_disk_is_a_storage_error(make_run: MakeRun, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/dev/full gives the very error of a full disk to the writer of the token streams."""
    run = make_run({"path": str(questions)})
    full = "import builtins, pathlib, sys; from trainwright.train.data import cache\n"
    full += "whole = pathlib.Path.open\n"
    full += "def open_(path, mode='r', *rest, **more):\n"
    full += "    if path.name.endswith('.bin') and 'w' in mode: path = pathlib.Path('/dev/full')\n"
    full += "    return whole(path, mode, *rest, **more)\n"
    full += "pathlib.Path.open = open_\n"
    full += "from trainwright.train.prepare import main; sys.exit(main(sys.argv[1:]))\n"
    done = subprocess.run([sys.executable, "-c", full, str(run)], capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.STORAGE, done.stderr
    assert "No space left on device" in done.stderr and "data.cache_dir" in done.stderr
    assert list((run.parent / "cache").glob("tokens/.unfinished-*")) == []


def test_two_sources_of_evaluation_data_are_refused(make_run: MakeRun, questions: Path) -> None:
    with pytest.raises(UserError, match=r"eval_path and data\.eval_split"):
        prepare(make_run({"path": str(questions), "eval_path": str(questions), "eval_split": 0.1}))


def test_no_data_path_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match=r"data\.path is not set"):
        prepare(make_run({}))


def test_the_command_needs_one_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == ExitCode.USAGE
    assert "RUN_DIR" in capsys.readouterr().err


def test_control_characters_of_the_data_do_not_reach_the_terminal(make_run: MakeRun, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a\x1b[31m‮", "response": "b"}) + "\n")
    run = make_run({"path": str(path)})
    done = subprocess.run([*COMMAND, str(run)], capture_output=True, timeout=120, env=os.environ | {"NO_COLOR": "1"})
    assert done.returncode == 0
    assert b"\x1b" not in done.stderr and "‮".encode() not in done.stderr


@pytest.mark.parametrize("tokenizer", ["trained", "of a saved model"])
def test_preparing_does_not_import_torch(
    make_run: MakeRun, questions: Path, tmp_path: Path, token_model: Path, tokenizer: str
) -> None:
    """It takes seconds of every start, and the ranks import it anyway; the tokens are the same with it."""
    job = {} if tokenizer == "trained" else {"model": {"name": str(token_model)}}
    run = make_run({"path": str(questions)}, **job)
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "transformers" in imported and "torch" not in imported
    assert "PyTorch" not in done.stderr
    with_torch = prepare(make_run({"path": str(questions), "cache_dir": str(tmp_path / "other")}, name="other", **job))
    assert json.loads((run / "prepared.json").read_text())["data_fingerprint"] == with_torch["data_fingerprint"]


def test_a_users_own_task_has_torch_and_transformers_while_preparing(make_run: MakeRun, questions: Path) -> None:
    """One that asks a model of its own about the rows, for example."""
    run = make_run({"path": str(questions)}, task="needing_both:OwnTask")
    source = """
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from trainwright.train.tasks.causal_lm import CausalLM

        class OwnTask(CausalLM):
            def __init__(self, job, tokenizer):
                super().__init__(job, tokenizer)
                sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
                model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
                assert model(input_ids=torch.zeros(1, 3, dtype=torch.int64)).logits.shape == (1, 3, len(tokenizer))
    """
    (run.parent / "needing_both.py").write_text(textwrap.dedent(source))
    done = subprocess.run([*COMMAND, str(run)], capture_output=True, text=True, timeout=300, cwd=run.parent)
    assert done.returncode == 0, done.stderr

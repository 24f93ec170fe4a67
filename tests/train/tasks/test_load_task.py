"""A job's task: built in, or a class of the user's own from the current folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainwright.errors import ExitCode, UserError
from trainwright.job.schema import Job
from trainwright.train.data.dataset import TokenDataset
from trainwright.train.prepare import prepare
from trainwright.train.tasks import load_task

MakeJob = Callable[..., Job]

MODULE = """
import numpy as np
import torch


class Reverse:
    streams = ("input_ids",)
    packable = False

    def __init__(self, job, tokenizer, column="text"):
        self.tokenizer, self.column = tokenizer, column

    def encode(self, row):
        text = row[self.column][::-1]
        return {"input_ids": self.tokenizer(text)["input_ids"]} if text else None

    def targets(self, sample):
        return len(sample["input_ids"]) - 1

    def collate(self, samples):
        return {"input_ids": torch.tensor(np.stack([sample["input_ids"] for sample in samples]))}

    def loss_sum(self, model, batch):
        return model(**batch).logits.float().sum()

    def auto_model_class(self):
        return "AutoModelForCausalLM"


class Half:
    streams = ("input_ids",)

    def __init__(self, job, tokenizer):
        pass

    def encode(self, row):
        return None


number = 7
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand in a folder with a module of tasks, and forget the module afterwards."""
    (tmp_path / "my_tasks.py").write_text(MODULE)
    (tmp_path / "needy_tasks.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("my_tasks", "needy_tasks"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["causal-lm", "seq2seq"])
def test_built_in_tasks(name: str, make_job: MakeJob, tokenizer: Any) -> None:
    task = load_task(make_job(name), tokenizer)
    assert task.auto_model_class() == {"causal-lm": "AutoModelForCausalLM", "seq2seq": "AutoModelForSeq2SeqLM"}[name]
    with pytest.raises(UserError, match="takes none"):
        load_task(make_job(name, task_options={"x": 1}), tokenizer)


def test_planned_tasks_say_so(make_job: MakeJob, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="`ct-clip` cannot be run by this version"):
        load_task(make_job("ct-clip"), tokenizer)


def test_a_class_from_the_current_folder_prepares_data(in_folder: Path) -> None:
    """The whole way: a user's task with an option, from rows to samples that come back."""
    (in_folder / "rows.jsonl").write_text('{"words": "abc"}\n{"words": ""}\n{"words": "12"}\n')
    scratch = {"architecture": "llama", "dimensions": {}}
    job = {
        "name": "own",
        "model": {"from_scratch": scratch, "tokenizer": {"vocab_size": 300}},
        "task": "my_tasks:Reverse",
        "task_options": {"column": "words"},
        "data": {"path": "rows.jsonl", "cache_dir": str(in_folder / "cache")},
    }
    (in_folder / "resolved.json").write_text(Job.model_validate(job).model_dump_json())
    prepared = prepare(in_folder)
    data = TokenDataset(prepared["train"]["cache"])
    tokenizer = prepared_tokenizer(prepared)
    assert [tokenizer.decode(data[i]["input_ids"]) for i in range(len(data))] == ["<bos>cba", "<bos>21"]
    assert prepared["report"]["train"]["counts"]["dropped_empty"] == 1
    assert np.array_equal(data.targets, [3, 2])

    (in_folder / "my_tasks.py").write_text(MODULE.replace("[::-1]", "[::-1] * 2"))
    sys.modules.pop("my_tasks")
    assert prepare(in_folder)["data_fingerprint"] != prepared["data_fingerprint"], "the task's own code counts"


def prepared_tokenizer(prepared: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(json.loads(json.dumps(prepared))["tokenizer_dir"])


@pytest.mark.parametrize(
    ("name", "options", "message", "hint"),
    [
        ("their_tasks:X", {}, "there is no module `their_tasks`", "put their_tasks.py into"),
        ("my_tasks.deeper:X", {}, "there is no module `my_tasks.deeper`", "into"),
        ("my_tasks:Revers", {}, "has no class `Revers`", "did you mean `my_tasks:Reverse`?"),
        ("my_tasks:number", {}, "has no class `number`", ""),
        ("needy_tasks:X", {}, "needs `a_library_that_is_not_there`, which is not installed", "install"),
        ("my_tasks:Reverse", {"colum": "x"}, "cannot be made: got an unexpected keyword", "task_options"),
        ("my_tasks:Half", {}, "lacks `packable`, `targets`, `collate`, `loss_sum`, `auto_model_class`", "protocol"),
    ],
)
def test_a_class_that_is_no_task_says_what_is_wrong(
    name: str, options: dict[str, Any], message: str, hint: str, in_folder: Path, make_job: MakeJob, tokenizer: Any
) -> None:
    with pytest.raises(UserError) as caught:
        load_task(make_job(name, task_options=options), tokenizer)
    assert message in caught.value.message and hint in " ".join(caught.value.hints)
    assert caught.value.exit_code in (ExitCode.MISSING, ExitCode.USAGE)

"""From files, presets and overrides to a Job whose every value has an origin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.errors import UserError
from trainwright.job.loading import Origin, load_job
from trainwright.job.schema import Job

TEXT = """\
name: a
model:
  name: gpt2
  tokenizer: other
method:
  targets: [q_proj, v_proj]
train:
  max_steps: null
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(TEXT)
    return tmp_path


def test_every_value_has_an_origin() -> None:
    loaded = load_job("job.yaml", ["train.learning_rate=2e-4", "model.tokenizer.vocab_size=500"])
    assert loaded.origins["name"] == Origin("file", "job.yaml:1:1")
    assert loaded.origins["model.name"] == Origin("file", "job.yaml:3:3")
    assert loaded.origins["model.tokenizer.vocab_size"] == Origin("override")
    assert loaded.origins["method.targets"] == Origin("file", "job.yaml:6:3")
    assert loaded.origins["train.max_steps"] == Origin("file", "job.yaml:8:3")
    assert loaded.origins["train.learning_rate"] == Origin("override")
    assert loaded.origins["train.seed"] == Origin("default")
    assert load_job("preset:paper_r64").origins["method.r"] == Origin("preset", "preset:paper_r64:15:3")


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.learning_rate=2e-4", "train", "learning_rate", 2e-4),
        ("model.name=Qwen/Qwen2.5-0.5B", "model", "name", "Qwen/Qwen2.5-0.5B"),
        ("method.targets=[k_proj]", "method", "targets", ["k_proj"]),
        (
            "data.columns={prompt: question, response: answer}",
            "data",
            "columns",
            {"prompt": "question", "response": "answer"},
        ),
        ("data.columns.prompt=question", "data", "columns", {"prompt": "question"}),
        ("model.tokenizer=null", "model", "tokenizer", None),
        ("model.tokenizer=", "model", "tokenizer", None),
        ("resources.gpus=[0, GPU-1234]", "resources", "gpus", [0, "GPU-1234"]),
        ('model.revision="10"', "model", "revision", "10"),
        ("data.path=s3://bucket/a=b", "data", "path", "s3://bucket/a=b"),
    ],
)
def test_an_override_wins_over_the_file(override: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(load_job("job.yaml", [override]).job, section), key) == value


def test_the_later_override_wins_and_can_mend_the_file() -> None:
    Path("job.yaml").write_text(TEXT.replace("null", "many"))
    job = load_job("job.yaml", ["train.max_steps=3", "train.max_steps=4", "eval.every=0.5 epochs"]).job
    assert job.train.max_steps == 4
    assert str(job.eval.every) == "0.5 epochs"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.learning_rat=1", "override: train.learning_rat: unknown key; did you mean `learning_rate`?"),
        ("trian.seed=1", "override: trian: unknown key; did you mean `train`?"),
        ("data.path.x=1", "override: data.path: expected text, not a mapping"),
        ("description=a: b", "override: description: expected text, not a mapping"),
        ("description=a: b: c", "override: description: this is not YAML: mapping values are not allowed here"),
        ("description=@a", "override: description: this is not YAML: found character '@' that cannot start any token"),
        ("description=*a", "override: description: the alias `*a` is not allowed; write the value out"),
        ("description=a\x1b[31m", "override: description: the character U+001B is not allowed"),
        ("--gpus", "override: `--gpus` is not an override; write `key.path=value`"),
        ("=3", "override: `=3` is not an override; write `key.path=value`"),
        ("train..seed=3", "override: `train..seed=3` is not an override; write `key.path=value`"),
        ("\udcff=3", "override: a key holds a character that is not allowed"),
    ],
)
def test_a_wrong_override_is_told(override: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        load_job("job.yaml", [override])
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(problem)
    caught.value.render().encode()


def test_paths_count_from_the_current_directory(folder: Path) -> None:
    for name in ("gpt2", "sub", "adapter"):
        Path(name).mkdir()
    Path("sub/train.jsonl").touch()
    overrides = [
        "data.path=sub/train.jsonl",
        "data.eval_path=org/dataset",
        "method.adapter=adapter",
        "method.type=lora",
    ]
    job = load_job("job.yaml", overrides).job
    assert job.data.path == str(folder / "sub/train.jsonl")
    assert job.model.name == str(folder / "gpt2")
    assert job.method.adapter == str(folder / "adapter")
    assert job.data.eval_path == "org/dataset"
    assert job.model.tokenizer == "other"
    assert load_job("job.yaml", [f"data.path={'a' * 5000}"]).job.data.path == "a" * 5000


def test_a_job_survives_its_json() -> None:
    job = load_job("job.yaml").job
    assert Job.model_validate_json(job.model_dump_json()) == job
    assert Job.model_validate(job.model_dump(mode="json")) == job


def test_the_name_of_a_preset_alone_is_explained() -> None:
    with pytest.raises(UserError) as caught:
        load_job("paper_r64")
    assert caught.value.hints == ("the preset of that name is `preset:paper_r64`",)
    with pytest.raises(UserError) as caught:
        load_job("preset:paper_r46")
    assert caught.value.hints[0] == "did you mean `paper_r64`?"


def test_the_job_room_needs_no_torch() -> None:
    """The core alone, as the wheel installs it, must load jobs and show them."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'numpy', 'datasets', 'peft'): sys.modules[name] = None\n"
        "import trainwright.cli.config, trainwright.cli.presets\n"
        "assert 'pydantic' not in sys.modules or 'trainwright.job.schema' not in sys.modules\n"
        "trainwright.cli.presets.presets(None, False)\n"
        "trainwright.cli.config.show('preset:paper_r64', [], False)\n"
        "trainwright.cli.config.schema()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train.learning_rate" in done.stdout

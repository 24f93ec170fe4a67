"""`trainwright config show` and `config schema`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright.cli.config import app
from trainwright.errors import UserError
from trainwright.job.schema import Job


@pytest.fixture(autouse=True)
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(f'name: a\ndescription: {"long " * 60}\nmodel:\n  name: gpt2\n  revision: "10"\n')


def test_show_prints_every_key_with_value_source_and_reason() -> None:
    result = CliRunner().invoke(app, ["show", "job.yaml", "train.learning_rate=3e-5"])
    assert result.exit_code == 0
    assert result.stderr == ""
    rows = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert ("long " * 60).strip() in rows["description"], "a long value must not be cut"
    columns = {key: [cell.strip() for cell in line.split("  ") if cell.strip()] for key, line in rows.items()}
    assert columns["KEY"] == ["KEY", "VALUE", "SOURCE", "REASON"]
    assert columns["model.name"] == ["model.name", "gpt2", "job.yaml:4:3", "given in the job file"]
    assert columns["model.revision"] == ["model.revision", '"10"', "job.yaml:5:3", "given in the job file"]
    assert columns["train.learning_rate"] == ["train.learning_rate", "3e-05", "override", "given on the command line"]
    assert columns["train.seed"] == ["train.seed", "42", "default", "default"]
    assert columns["resources.gpus"][3] == "chosen by the plan when the job is run"
    assert columns["eval.every"][1] == "1 epoch"
    sections = Job.model_fields.keys() - {"claims", "task_options"}
    assert sections <= {key.split(".")[0] for key in rows}
    assert len({line.rindex(columns[key][3]) for key, line in rows.items()}) == 1, "columns must be aligned"


def test_show_as_json_is_one_document() -> None:
    result = CliRunner().invoke(app, ["show", "preset:paper_r64", "--json", "train.seed=7"])
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1
    keys = {row["key"]: row for row in document["keys"]}
    assert keys["train.seed"] == {
        "key": "train.seed",
        "value": 7,
        "source": "override",
        "location": None,
        "reason": "given on the command line",
    }
    assert keys["method.r"]["location"] == "preset:paper_r64:15:3"
    assert keys["model.revision"]["value"] is None


def test_show_refuses_a_wrong_job_and_prints_no_data() -> None:
    result = CliRunner().invoke(app, ["show", "job.yaml", "train.sed=7"])
    assert isinstance(result.exception, UserError)
    assert result.stdout == ""


def test_schema_is_a_json_schema_with_descriptions() -> None:
    result = CliRunner().invoke(app, ["schema"])
    schema = json.loads(result.stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["title"] == "Job"
    train = schema["$defs"]["TrainSection"]
    assert train["additionalProperties"] is False
    assert all(field["description"] for field in train["properties"].values())
    every = schema["$defs"]["CheckpointSection"]["properties"]["every"]
    assert (every["type"], every["default"]) == ("string", "1 epoch")

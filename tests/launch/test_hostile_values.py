"""No value of a job is ever run: each hostile text is refused, or is the same text at the other end of all we write.

Done-when 5 of the issue on clusters. Every string field of the schema is found by walking it, so a new one is in.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright.errors import UserError
from trainwright.hardware.inventory import Device
from trainwright.job.loading import load_job
from trainwright.job.schema import Job
from trainwright.launch.files import Nodes
from trainwright.launch.files.plan_folder import file_texts, write_files
from trainwright.launch.own_script.script_run import script_commands
from trainwright.launch.own_script.starting import ScriptStart
from trainwright.launch.slurm.batch_script import ScriptInput, script_text
from trainwright.launch.train_run import worker_commands
from trainwright.plan.choose import Plan, choose
from trainwright.plan.slurm.slurm_request import SlurmRequest
from trainwright.runs.folder import RunFolder

CANARY = "canary"
TOUCH = f"touch {CANARY}"
HOSTILE = [
    f"$({TOUCH})",
    f"`{TOUCH}`",
    f"; {TOUCH};",
    f"&& {TOUCH} &&",
    f"| {TOUCH}",
    f"\n{TOUCH}\n",
    f"\r{TOUCH}",
    f"a\n#SBATCH --wrap='{TOUCH}'",
    f"#SBATCH --wrap={TOUCH}",
    "#SBATCH --output=/tmp/x",
    f"' ; {TOUCH} ; '",
    f'" ; {TOUCH} ; "',
    f"'$({TOUCH})'",
    f'"$({TOUCH})"',
    f"\\$({TOUCH})",
    f"\\\n{TOUCH}",
    f"${{IFS}}$({TOUCH})",
    f"$'\\n{TOUCH}'",
    f"<({TOUCH})",
    f"> {CANARY}",
    f"{{}}; {TOUCH}",
    "{output_dir}",
    "{unknown}",
    "{{output_dir}}",
    "{",
    "}",
    "{0.__class__}",
    "{!r}",
    "%(x)s %s %n",
    "{{ 7 * 7 }}{% raw %}",
    "--help",
    "-rf",
    "--config_file=/etc/passwd",
    "-m",
    "--",
    "-",
    "",
    " ",
    "a b\tc",
    "*",
    "~/x",
    "../../etc/passwd",
    "nul\0byte",
    "\x1b[2J\x1b]0;owned\x07",
    "\u202egnp.exe",
    "\u2028line",
    "café 漢字 🚀 ﷽",
    "x" * 20_000,
    "x" * 40_000,
    "\ud800",
    "!!python/object/apply:os.system ['touch canary']",
    "&a [*a, *a]",
    "null",
    "2e5",
]
MINIMAL: dict[str, Any] = {"name": "x", "model": {"name": "m"}, "data": {"path": "d.jsonl"}}
SCRIPT = {"script": ["python", "train.py", "--x", "{model}", "{output_dir}", "{data}", "--resume", "{resume_from}"]}
CPU = (Device(kind="cpu", name="a processor"),)


SCHEMA = Job.model_json_schema()


def string_fields(shape: dict[str, Any] = SCHEMA, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of everything in a job that may be any text, and of keys that may have any name (last: KEY)."""
    if "$ref" in shape:
        shape = SCHEMA["$defs"][shape["$ref"].rpartition("/")[2]]
    for option in shape.get("anyOf", ()):
        yield from string_fields(option, path)
    if shape.get("type") == "string" and not {"enum", "const"} & shape.keys():
        yield path
    if "items" in shape:
        yield from string_fields(shape["items"], (*path, 0))
    for key, member in shape.get("properties", {}).items():
        yield from string_fields(member, (*path, key))
    if shape.get("additionalProperties"):
        yield (*path, "KEY")
        yield (*path, "value")


FIELDS = sorted(set(string_fields()), key=str)


def with_value(path: tuple[str | int, ...], value: str) -> dict[str, Any]:
    """Return a job of a script that has the value at the path."""
    job: dict[str, Any] = json.loads(json.dumps(MINIMAL | SCRIPT))
    if path[0] == "model" and "from_scratch" in path:
        job["model"] = {"from_scratch": {"architecture": "llama", "dimensions": {}}, "tokenizer": "t"}
        job["script"] = ["python", "train.py"]
    if path[0] == "model" and "vocab_size" in path:
        return job
    section: Any = job
    for step, following in pairwise(path):
        if isinstance(following, int):
            if not isinstance(section.get(step), list):
                section[step] = ["plain"]
        else:
            section.setdefault(step, {})
        section = section[step]
    if path[-1] == "KEY":
        section[value] = "x"
    else:
        section[path[-1]] = value
    return job


def loaded(place: Path, values: dict[str, Any]) -> Job | None:
    """Return the job as read from a file, None where it is refused."""
    file = place / "job.yaml"
    file.write_bytes(json.dumps(values).encode("utf-8", "surrogatepass"))
    try:
        return load_job(str(file)).job
    except UserError as error:
        assert error.render().replace("\n", "").isprintable(), "an error is shown on a terminal"
        return None


def planned(job: Job) -> tuple[Job, Plan]:
    """Plan for two processes of a machine without a GPU."""
    resources = job.resources.model_copy(update={"device": "cpu", "gpus": "auto", "ranks": 2})
    return choose(job.model_copy(update={"resources": resources, "launcher": "torchrun"}), set(), CPU)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import json, sys\nprint(json.dumps(sys.argv))\n")
    return tmp_path


def test_the_walk_finds_the_fields() -> None:
    assert {("name",), ("output_dir",), ("model", "name"), ("script", 0), ("data", "path"), ("task",)} <= set(FIELDS)
    assert len(HOSTILE) >= 50


@pytest.mark.parametrize("path", FIELDS, ids=lambda path: ".".join(map(str, path)))
def test_a_hostile_text_is_refused_or_survives_every_file_and_line(place: Path, path: tuple[str | int, ...]) -> None:
    harmless = file_texts(place / "plan", *planned(Job.model_validate(MINIMAL | SCRIPT)), Nodes(1, 2))
    survived = 0
    for value in HOSTILE:
        job = loaded(place, with_value(path, value))
        if job is None:
            continue
        survived += 1
        try:
            job, plan = planned(job)
            folder = RunFolder(Path(job.output_dir) / job.name)
            texts = file_texts(place / "plan", job, plan, Nodes(1, 2))
        except UserError:
            continue
        assert texts["launch.sh"] == harmless["launch.sh"], "what a shell reads is the same whatever the job says"
        assert Job.model_validate(json.loads(texts["resolved.json"])) == job
        start = json.loads(texts["script.json"])
        launcher, command = script_commands(folder, job, plan)
        assert shlex.split(command) == start["command"]
        assert shlex.split(launcher)[-1] == str(folder.launcher_dir / "script.json")
        for line in worker_commands(folder, plan):
            assert shlex.split(line)[-1] == str(folder.path)
        assert yaml.safe_load(texts["accelerate_config_single_node.yaml"])["num_processes"] == 2
        assert_sbatch_is_literal(folder)
    assert not (place / CANARY).exists()
    assert survived < len(HOSTILE), "a NUL is refused everywhere"


def assert_sbatch_is_literal(folder: RunFolder) -> None:
    """Slurm's script holds the path of one file, as one word, and logs under the run's folder; or is refused."""
    request = SlurmRequest(
        partition="gpu", nodes=1, gpus_per_node=2, gpu_type=None, time_limit_min=60, memory_mib=1000, cpus=2,
        constraint=None, account=None, qos=None,
    )  # fmt: skip
    given = ScriptInput(
        name="x", request=request, job_json=folder.launcher_dir / "job.json", logs_dir=folder.logs_dir,
        working_dir=folder.path.parent,
    )  # fmt: skip
    try:
        text = script_text(given)
    except UserError:
        return
    lines = text.splitlines()
    assert shlex.split(lines[-1])[-1] == str(given.job_json)
    options = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in lines if line.startswith("#SBATCH ")]
    assert len(options) == len([line for line in lines if line.startswith("#SBATCH")])
    assert f"--output={str(given.logs_dir).replace('%', '%%')}/train_x_%j.out" in options


def test_hostile_arguments_reach_the_script_as_they_are_through_launch_sh(place: Path) -> None:
    """A stub in the place of the launcher starts what it is told; `bash -n` and the run itself execute nothing else."""
    kept = [value for value in HOSTILE if loaded(place, with_value(("script", 2), value)) is not None]
    plain = [value for value in kept if not value.startswith("{") or value.startswith("{{")]
    assert len(plain) >= 25
    job = loaded(place, MINIMAL | {"script": ["python", "train.py", *plain], "launcher": "torchrun"})
    assert job is not None
    job, plan = planned(job)
    directory = place / f"a plan's $({TOUCH}) `x`"
    write_files(directory, job, plan)
    stubs = place / "stubs"
    stubs.mkdir()
    stub = stubs / "python"
    stub.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "${{@:5}}"\n')
    stub.chmod(0o755)
    subprocess.run(["bash", "-n", directory / "launch.sh"], check=True)
    environment = os.environ | {"PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", directory / "launch.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [value.replace("{{", "{").replace("}}", "}") for value in plain]
    assert json.loads(done.stdout)[1:] == told
    assert not list(place.rglob(CANARY))


def test_an_attempts_file_holds_the_command_word_for_word(place: Path) -> None:
    """From script.json to `execve`: what is written is what is read."""
    folder = RunFolder(place / "run")
    folder.create()
    attempt = folder.start_attempt()
    words = tuple(value for value in HOSTILE if "\ud800" not in value)
    start = ScriptStart(
        attempt=attempt, run_dir=str(folder.path), command=words, launcher="python", working_directory="/",
        nodes=1, ranks_per_node=1, device="cpu", accelerate_config="/", environment={},
    )  # fmt: skip
    assert ScriptStart.read(start.write()) == start

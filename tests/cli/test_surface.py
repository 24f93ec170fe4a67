"""The public surface: commands, flags, exit codes, and what a start of the command costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import typer

from trainwright.cli import app
from trainwright.errors import ExitCode

# A new flag is added here on purpose or not at all: values of a job are overrides, not flags.
SURFACE = {
    "train": {
        "--gpus",
        "--resume",
        "--fresh",
        "--dry-run",
        "--allow",
        "--max-restarts",
        "--nodes",
        "--node-rank",
        "--nnodes",
        "--rdzv",
    },
    "submit": {
        "--gres",
        "--nodes",
        "--partition",
        "--time",
        "--memory-gib",
        "--cpus",
        "--account",
        "--qos",
        "--constraint",
        "--chain",
        "--if-refused",
        "--template",
        "--allow",
        "--dry-run",
    },
    "status": {"--output-dir", "--json"},
    "logs": {"--follow", "--output-dir"},
    "cancel": {"--output-dir"},
    "resume": {"--chain", "--if-refused", "--output-dir"},
    "demo": {"--output-dir", "--seed"},
    "doctor": {"--gpus", "--json"},
    "report": {"--out", "--json", "--output-dir"},
    "runs": {"--state", "--since", "--rebuild", "--json"},
    "watch": {"--once", "--json", "--web", "--port", "--output-dir"},
    "eval": {
        "--model",
        "--n-questions",
        "--n_questions",
        "--difficulty",
        "--seed",
        "--gpu-mode",
        "--gpu_mode",
        "--gpu-ids",
        "--gpu_ids",
        "--workers",
        "--compare",
        "--fixed-k",
        "--fixed_k",
        "--frontier",
        "--quick",
        "--fresh",
        "--dry-run",
        "--json",
    },
    "gpus": {"--gpus", "--slurm", "--gpu-type", "--json"},
    "plan": {
        "--gpus",
        "--inventory",
        "--goal",
        "--samples",
        "--tokens-per-sample",
        "--trace",
        "--recording",
        "--slurm",
        "--partition",
        "--account",
        "--qos",
        "--gpu-type",
        "--write",
        "--json",
    },
    "tune": {"--gpus", "--level", "--write", "--fresh", "--timeout", "--json"},
    "scaling": {"--gpus", "--mode", "--steps", "--timeout", "--min-gain", "--plot", "--json"},
    "presets": {"--json"},
    "config show": {"--json"},
    "config schema": set(),
}


def _flags(command: object, prefix: str = "") -> dict[str, set[str]]:
    found = {}
    for name, child in command.commands.items():
        if hasattr(child, "commands"):
            found |= _flags(child, f"{prefix}{name} ")
        else:
            options = {option for parameter in child.params for option in parameter.opts if option.startswith("--")}
            found[f"{prefix}{name}"] = options - {"--help"}
    return found


def test_commands_and_flags_are_these_and_no_others() -> None:
    assert _flags(typer.main.get_command(app)) == SURFACE


def test_exit_codes_that_scripts_rely_on() -> None:
    wanted = {"DONE": 0, "FAILED": 1, "USAGE": 2, "NO_PLAN_FITS": 3, "MISSING": 4, "STORAGE": 73, "STOPPED": 75}
    wanted |= {"HANG": 76, "OUT_OF_MEMORY": 77, "NO_VALID_CHECKPOINT": 79}
    assert {code.name: int(code) for code in ExitCode} == wanted
    assert not {130, 137, 143} & set(ExitCode), "a signal's own code is never given a meaning of ours"


def test_help_loads_neither_torch_nor_the_schema() -> None:
    script = (
        "import sys\n"
        "from trainwright.cli import main\n"
        "sys.argv = ['trainwright', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'ruamel', 'rich'} & set(sys.modules)\n"
        "print('LOADED', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_errors_come_as_json_where_json_was_asked_for(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: a\nmodel: {name: x}\ntrain: {learning_rat: 1}\n")
    done = _trainwright("config", "show", str(job), "--json")
    assert done.returncode == ExitCode.USAGE
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == ExitCode.USAGE
    assert any("learning_rat" in problem for problem in error["problems"])


def test_a_closed_pipe_is_no_error() -> None:
    piped = f"{sys.executable} -m trainwright config schema | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", piped], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""


def test_unknown_command_names_the_nearest() -> None:
    done = _trainwright("trian")
    assert done.returncode == ExitCode.USAGE
    assert "train" in done.stderr


def test_resume_takes_a_folder_or_nothing(tmp_path: Path) -> None:
    from trainwright.cli.train import with_resume_value

    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    assert with_resume_value(["train", "job.yaml", "--resume"]) == ["train", "job.yaml", "--resume=latest"]
    assert with_resume_value(["train", "--resume", "job.yaml"]) == ["train", "--resume=latest", "job.yaml"]
    given = ["train", "--resume", str(checkpoint), "job.yaml"]
    assert with_resume_value(given) == given


def _trainwright(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "trainwright", *arguments], capture_output=True, text=True)

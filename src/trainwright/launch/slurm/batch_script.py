"""The batch script: a pure function of a request and of the path of a JSON file.

`#SBATCH` lines are read by Slurm as literal text and the last line by bash; neither ever holds a value of a job, and
what they do hold is refused where it could end a line.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jinja2

from trainwright.errors import ExitCode, UserError
from trainwright.job.schema import NAME_PATTERN
from trainwright.plan.slurm.slurm_request import SlurmRequest
from trainwright.plan.slurm.stop_lead import USUAL_S

BATCH: Final = "trainwright.launch.slurm.batch"
PLACEHOLDERS: Final = ("directives", "launch")
_TEMPLATE: Final = Path(__file__).with_name("job.sbatch.j2")


@dataclass(frozen=True, kw_only=True)
class ScriptInput:
    """All that a script is made of; `job_json` says what to run, the logs go to `logs_dir`.

    Relative paths of the job, and modules of its own tasks, count from `working_dir`. The job is told of its time limit
    `grace_s` seconds before.
    """

    name: str
    request: SlurmRequest
    job_json: Path
    logs_dir: Path
    working_dir: Path
    python: str = sys.executable
    grace_s: int = USUAL_S


def sbatch_options(given: ScriptInput) -> tuple[str, ...]:
    """Return the options of sbatch, one argument each; the script's `#SBATCH` lines say the same.

    The signal goes to the batch process alone (B:), which passes it on in whatever phase the run is. USR2, as NCCL
    takes USR1 for itself. Appended to, as Slurm would empty the logs of a requeued job.

    Raises:
        UserError: a name or a path holds what could end a line.
    """
    assert re.fullmatch(NAME_PATTERN, given.name), given.name
    logs = _pattern(given.logs_dir / f"train_{given.name}")
    return (
        f"--job-name={given.name}",
        *given.request.options(),
        f"--chdir={_plain(given.working_dir)}",
        f"--output={logs}_%j.out",
        f"--error={logs}_%j.err",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR2@{given.grace_s}",
    )


def script_text(given: ScriptInput, template: str | None = None) -> str:
    """Return the script; `template` is a site's own in place of the one that is shipped.

    Raises:
        UserError: a path cannot stand in a script, or the template does not hold both lines or is no bash.
    """
    directives = "\n".join(f"#SBATCH {_quoted(option)}" for option in sbatch_options(given))
    launch = "exec " + shlex.join([given.python, "-m", BATCH, str(_plain(given.job_json))])
    own = template if template is not None else _TEMPLATE.read_text()
    try:
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        text = environment.from_string(own).render(directives=directives, launch=launch)
    except jinja2.TemplateError as error:
        raise _refused(f"the template cannot be filled: {error}") from error
    _check(text, directives, launch)
    return text


def _check(text: str, directives: str, launch: str) -> None:
    problems = []
    lines = text.split("\n")
    if not lines[0].startswith("#!"):
        problems.append("its first line names no shell: #!/bin/bash")
    if directives not in text:
        problems.append("{{ directives }} is not there, once and at the start of a line")
    elif lines.index(directives.split("\n")[0]) > _first_command(lines):
        problems.append("a command comes before {{ directives }}: Slurm reads no #SBATCH line after it")
    if lines.count(launch) != 1:
        problems.append("{{ launch }} is not there once, on a line of its own")
    if problems:
        raise _refused("the template makes no script that would run", problems)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _refused("the template makes no script that bash reads", done.stderr.strip().splitlines())


def _first_command(lines: list[str]) -> int:
    commands = [number for number, line in enumerate(lines) if line.strip() and not line.startswith("#")]
    return commands[0] if commands else len(lines)


def _refused(message: str, problems: list[str] | tuple[str, ...] = ()) -> UserError:
    hints = ["a template is a bash script with {{ directives }} after its first line and {{ launch }} at its end"]
    return UserError(message, problems=problems, hints=hints)


def _plain(path: Path) -> Path:
    if not str(path).isprintable():
        raise UserError(f"the path {str(path)!r} has control characters in it", exit_code=ExitCode.USAGE)
    return path


def _pattern(path: Path) -> str:
    """Return a path as Slurm's file name pattern, in which `%` is a sign and `\\` takes the signs away."""
    if "\\" in str(_plain(path)):
        raise UserError(
            f"Slurm cannot write its logs to {path}: it reads a backslash otherwise",
            hints=["set output_dir to a folder without one"],
        )
    return str(path).replace("%", "%%")


def _quoted(option: str) -> str:
    """Return an option as Slurm splits an `#SBATCH` line: blanks, quotes and `#` end it unless they are quoted."""
    if re.fullmatch(r"[A-Za-z0-9_./:%@=,+&|*\[\]()-]+", option):
        return option
    return '"' + option.replace('"', '\\"') + '"'

"""`trainwright plan JOB --write DIR`: a folder that holds a plan and what starts it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.job.schema import Job
from trainwright.launch.files import deepspeed
from trainwright.launch.files.accelerate import MULTI_NODE, SINGLE_NODE, accelerate_yaml
from trainwright.launch.files.deepspeed import DEEPSPEED_ACCELERATE, DEEPSPEED_ENGINE, DEEPSPEED_TRAINER
from trainwright.launch.files.launch_script import LAUNCH_SH, SCRIPT_JSON, launch_script
from trainwright.launch.files.nodes import Nodes
from trainwright.launch.files.script_json import script_start
from trainwright.plan.choose import Plan
from trainwright.runs.writing import TEMPORARY_PREFIX, plain, write_new

RESOLVED_JSON = "resolved.json"
PLAN_JSON = "plan.json"
NAMES = (
    RESOLVED_JSON,
    PLAN_JSON,
    SINGLE_NODE,
    MULTI_NODE,
    DEEPSPEED_TRAINER,
    DEEPSPEED_ACCELERATE,
    DEEPSPEED_ENGINE,
    SCRIPT_JSON,
    LAUNCH_SH,
)


def write_files(
    directory: Path, job: Job, plan: Plan, nodes: Nodes | None = None, *, of_run: bool = False
) -> list[Path]:
    """Write the files of a plan and return their paths; `nodes` are those of the plan's devices when left out.

    What an earlier plan wrote there and this one has not is removed, so that no file contradicts another. A folder
    `of_run` is a run folder's own, where a submission may have left its files already.

    Raises:
        UserError: nodes and plan do not go together, or the folder holds something else or cannot be written.
    """
    directory = _absolute(directory)
    texts = file_texts(directory, job, plan, nodes or Nodes.of(plan))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not of_run:
            _require_own(directory)
        for name in NAMES:
            if name not in texts:
                (directory / name).unlink(missing_ok=True)
        for name, text in texts.items():
            _replace(directory / name, text)
    except OSError as error:
        raise UserError(
            f"the files cannot be written to {directory}: {error.strerror}",
            hints=["name a folder that you may write to"],
            exit_code=ExitCode.STORAGE,
        ) from error
    return [directory / name for name in texts]


def file_texts(directory: Path, job: Job, plan: Plan, nodes: Nodes) -> dict[str, str]:
    """Return the text of each file by its name, the same bytes for the same plan, nodes and absolute `directory`."""
    layout = plan.layout
    texts = {
        RESOLVED_JSON: _json(job.model_dump(mode="json")),
        PLAN_JSON: _json(plan.to_json()),
        SINGLE_NODE if nodes.count == 1 else MULTI_NODE: accelerate_yaml(
            layout, nodes, directory / DEEPSPEED_ACCELERATE
        ),
    }
    start = None if job.script is None else script_start(job, plan, directory, nodes=nodes.count)
    texts[LAUNCH_SH] = launch_script(layout, nodes, None if start is None else start.launcher)
    if start is not None:
        texts[SCRIPT_JSON] = _json(dataclasses.asdict(start))
    if layout.strategy.startswith("zero"):
        texts[DEEPSPEED_TRAINER] = _json(deepspeed.trainer_config(job, layout))
        texts[DEEPSPEED_ACCELERATE] = _json(deepspeed.accelerate_config(job, layout))
        if start is not None:
            texts[DEEPSPEED_ENGINE] = _json(deepspeed.engine_config(job, layout))
    return texts


def _absolute(directory: Path) -> Path:
    if not all(character.isprintable() for character in str(directory)):
        raise UserError(f"the folder {str(directory)!r} has control characters in its name")
    return directory.absolute()


def _require_own(directory: Path) -> None:
    present = {entry.name for entry in directory.iterdir()}
    if present and PLAN_JSON not in present:
        raise UserError(
            f"{directory} holds other files, which these could replace",
            hints=["name a folder that is empty or not there yet"],
        )


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{os.urandom(4).hex()}")
    try:
        write_new(temporary, text.encode())
        if path.name == LAUNCH_SH:
            temporary.chmod(0o700)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _json(content: dict[str, Any]) -> str:
    return json.dumps(plain(content), indent=2, allow_nan=False) + "\n"

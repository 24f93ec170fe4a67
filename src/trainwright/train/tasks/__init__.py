"""The tasks, and how a job's task is found."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.job.schema import BUILT_IN_TASKS, PLANNED_TASKS, Job
from trainwright.train.tasks.causal_lm import CausalLM
from trainwright.train.tasks.protocol import MEMBERS, Task
from trainwright.train.tasks.seq2seq import Seq2Seq

_BUILT_IN: dict[str, Callable[[Job, Any], Task]] = {"causal-lm": CausalLM, "seq2seq": Seq2Seq}
assert tuple(_BUILT_IN) == BUILT_IN_TASKS


def load_task(job: Job, tokenizer: Any) -> Task:
    """Return the job's task; a `module:Class` is looked for in the current folder too.

    Raises:
        UserError: there is no such module or class, it takes no such options, or it is no task.
    """
    if job.task in PLANNED_TASKS:
        raise UserError(f"task `{job.task}` cannot be run by this version", hints=["see `trainwright presets`"])
    if job.task in _BUILT_IN:
        if job.task_options:
            raise UserError(f"task_options: `{job.task}` takes none", hints=["remove task_options"])
        return _BUILT_IN[job.task](job, tokenizer)
    return _own_task(job, tokenizer)


def _own_task(job: Job, tokenizer: Any) -> Task:
    module_name, class_name = job.task.split(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            message, hint = f"task `{job.task}`: there is no module `{error.name}`", f"put {error.name}.py into {here}"
        else:
            message, hint = f"task `{job.task}` needs `{error.name}`, which is not installed", "install it"
        raise UserError(message, hints=[hint], exit_code=ExitCode.MISSING) from error
    found: Any = getattr(module, class_name, None)
    if not isinstance(found, type):
        near = difflib.get_close_matches(class_name, dir(module), n=1)
        hints = [f"did you mean `{module_name}:{near[0]}`?"] if near else []
        raise UserError(
            f"task `{job.task}`: the module {module.__file__} has no class `{class_name}`",
            hints=hints,
            exit_code=ExitCode.MISSING,
        )
    try:
        inspect.signature(found).bind(job, tokenizer, **job.task_options)
    except TypeError as error:
        raise UserError(
            f"task `{job.task}` cannot be made: {error}",
            hints=[f"it is called as {class_name}(job, tokenizer, **task_options)"],
        ) from error
    task: Task = found(job, tokenizer, **job.task_options)
    lacking = [name for name in MEMBERS if not hasattr(task, name)]
    if lacking:
        raise UserError(
            f"task `{job.task}` lacks {', '.join(f'`{name}`' for name in lacking)}",
            hints=["a task has the members of trainwright.train.tasks.protocol.Task"],
        )
    return task

"""The `trainwright` command: one file a command, whose own imports wait until it is called."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final

import typer

from trainwright import __version__
from trainwright.cli import (
    cancel,
    config,
    demo,
    doctor,
    eval,
    gpus,
    logs,
    plan,
    presets,
    report,
    resume,
    runs,
    scaling,
    status,
    submit,
    train,
    tune,
    watch,
)
from trainwright.errors import ExitCode, UserError
from trainwright.hardware.threads import waiting_policy

OBJECTS_BETWEEN_COLLECTIONS = 200_000
"""Python by itself looks for cycles after 700 new objects, which finds none and is an eighth of a plan's time."""

COMMANDS: Final[Mapping[str, Callable[..., Any] | typer.Typer]] = {
    "train": train.train,
    "submit": submit.submit,
    "status": status.status,
    "logs": logs.logs,
    "cancel": cancel.cancel,
    "resume": resume.resume,
    "demo": demo.demo,
    "eval": eval.eval_,
    "watch": watch.watch,
    "doctor": doctor.doctor,
    "report": report.report,
    "runs": runs.runs,
    "gpus": gpus.gpus,
    "plan": plan.plan,
    "tune": tune.tune,
    "scaling": scaling.scaling,
    "presets": presets.presets,
    "config": config.app,
}


def _with(names: Iterable[str]) -> typer.Typer:
    """The command with these subcommands: typer reads the flags of all that it has, whichever is called."""
    made = typer.Typer(
        name="trainwright",
        help="Tell it your model, your data and the GPUs you can get; it plans, launches, keeps running and explains.",
        rich_markup_mode=None,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    made.callback()(_root)
    for name in names:
        command = COMMANDS[name]
        if isinstance(command, typer.Typer):
            made.add_typer(command, name=name)
        else:
            made.command(name)(command)
    return made


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app = _with(COMMANDS)


def main() -> None:
    """Run the command; errors for the user go to stderr, with the exit code that says what kind they are."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    os.environ.update(waiting_policy())  # what the command starts inherits it: preparing, traces, checks, workers
    try:
        arguments = eval.with_lists(train.with_resume_value(sys.argv[1:]))
        command = _with(arguments[:1]) if arguments and arguments[0] in COMMANDS else app
        command(args=arguments, prog_name="trainwright")
    except UserError as error:
        if "--json" in sys.argv:
            print(json.dumps({"schema_version": 1, "error": error.to_json()}, indent=2))
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing is wrong, and there is nowhere left to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.DONE)

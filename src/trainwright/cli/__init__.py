"""The `trainwright` command: one file a command, whose own imports wait until it is called."""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Annotated

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

OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Python looks for cycles after 700 new objects by itself, which finds nothing and is a tenth of the time of a plan."""

app = typer.Typer(
    name="trainwright",
    help="Tell it your model, your data and the GPUs you can get; it plans, launches, keeps running and explains.",
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(train.train)
app.command()(submit.submit)
app.command()(status.status)
app.command()(logs.logs)
app.command()(cancel.cancel)
app.command()(resume.resume)
app.command()(demo.demo)
app.command("eval")(eval.eval_)
app.command()(watch.watch)
app.command()(doctor.doctor)
app.command()(report.report)
app.command()(runs.runs)
app.command()(gpus.gpus)
app.command()(plan.plan)
app.command()(tune.tune)
app.command()(scaling.scaling)
app.command()(presets.presets)
app.add_typer(config.app, name="config")


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command; errors for the user go to stderr, with the exit code that says what kind they are."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    try:
        app(args=eval.with_lists(train.with_resume_value(sys.argv[1:])), prog_name="trainwright")
    except UserError as error:
        if "--json" in sys.argv:
            print(json.dumps({"schema_version": 1, "error": error.to_json()}, indent=2))
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing is wrong, and there is nowhere left to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.DONE)

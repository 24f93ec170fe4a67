"""`trainwright eval`: ask a model the questions of a benchmark, under one policy or several."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trainwright.evaluate.eval_config import EvalConfig

DEFAULT = ""
"""What `--compare` and `--frontier` stand for where nothing follows them."""
_LISTS = {
    "--gpu-ids": re.compile(r"\d+|(GPU|MIG)-\S+"),
    "--gpu_ids": re.compile(r"\d+|(GPU|MIG)-\S+"),
    # A policy may hold a `=` behind its colon, `mdp:mu=2`; an override has it before any.
    "--compare": re.compile(r"(?!-)(?!.*\.ya?ml$)[^=:]+(:.+)?"),
    "--frontier": re.compile(r"[\d.][\d.,e-]*"),
}
"""Flags that several values may follow, and what these look like."""


def eval_(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EVAL.yaml] [KEY.PATH=VALUE]...", help="An evaluation file, and values laid over it."),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="A folder, or a name of the hub.")] = None,
    n_questions: Annotated[
        int | None, typer.Option("--n-questions", "--n_questions", "-n", metavar="N", help="How many; 100 by default.")
    ] = None,
    difficulty: Annotated[
        str | None, typer.Option("--difficulty", "-d", metavar="LEVEL", help="easy, medium, hard or mixed.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of the choice of questions; 42 by default.")] = None,
    gpu_mode: Annotated[
        str | None,
        typer.Option("--gpu-mode", "--gpu_mode", metavar="MODE", help="single, data_parallel, accelerate or auto."),
    ] = None,
    gpu_ids: Annotated[
        list[str] | None,
        typer.Option("--gpu-ids", "--gpu_ids", metavar="N...", help="Which GPUs: 0 1 2 3, or 0,1,2,3."),
    ] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Copies of the model on a processor.")] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="POLICY...", help="Compare policies: mdp fixed:3; mdp and fixed:K where none is named."),
    ] = None,
    fixed_k: Annotated[
        int | None,
        typer.Option("--fixed-k", "--fixed_k", "-k", metavar="K", min=0, help="Compare with K retrievals; 3."),
    ] = None,
    frontier: Annotated[
        list[str] | None,
        typer.Option(metavar="MU...", help="The MDP at several weights of cost; 0.1 0.3 0.6 1 2 4. Plots accuracy."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three tests of five questions each.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ask again; what was answered is kept aside.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, print each worker's command, run none.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Evaluate a model on a benchmark; the same command starts it, goes on with it, or shows that it is finished."""
    from trainwright.errors import ExitCode, UserError
    from trainwright.evaluate.eval_config import DEFAULT_FIXED_K, load_evaluation
    from trainwright.evaluate.frontier import WEIGHTS, with_frontier

    given: dict[str, tuple[str, Any]] = {
        "model": ("--model", model),
        "n_questions": ("--n-questions", n_questions),
        "difficulty": ("--difficulty", difficulty),
        "seed": ("--seed", seed),
        "gpu_mode": ("--gpu-mode", gpu_mode),
        "gpu_ids": ("--gpu-ids", _ids(gpu_ids)),
        "workers": ("--workers", workers),
        "policies": ("--compare", _policies(compare, DEFAULT_FIXED_K if fixed_k is None else fixed_k, fixed_k)),
    }
    source, overrides = _source(arguments or [])
    asked = load_evaluation(source, overrides, {key: value for key, value in given.items() if value[1] is not None})
    if frontier is not None and quick:
        raise UserError("--quick compares policies of its own", hints=["leave out --quick, or --frontier"])
    if frontier is not None:
        asked = with_frontier(asked, " ".join(frontier).replace(",", " ").split() or WEIGHTS)
    if quick:
        code = _run_quick(asked, as_json=as_json, dry_run=dry_run)
    else:
        code = _run(asked, as_json=as_json, fresh=fresh, dry_run=dry_run)
    raise typer.Exit(code or ExitCode.DONE)


def with_lists(arguments: list[str]) -> list[str]:
    """Return the command line of `eval` with each flag that several values follow spelled once for each of them."""
    if arguments[:1] != ["eval"]:
        return arguments
    spelled: list[str] = []
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if flag not in _LISTS:
            spelled.append(flag)
            continue
        values = []
        while rest and _LISTS[flag].fullmatch(rest[0]) and not Path(rest[0]).is_file():
            values.append(rest.pop(0))
        if not values and flag in ("--compare", "--frontier"):
            values = [DEFAULT]
        spelled += [f"{flag}={value}" for value in values] or [flag]
    return spelled


def _source(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the file, if the first argument is one, and the overrides."""
    if arguments and "=" not in arguments[0]:
        return arguments[0], arguments[1:]
    return None, arguments


def _ids(values: list[str] | None) -> list[int | str] | None:
    """Return GPU ids as they were listed, in one argument or in several."""
    if values is None:
        return None
    entries = " ".join(values).replace(",", " ").split()
    return [int(entry) if entry.isdigit() else entry for entry in entries]


def _policies(compare: list[str] | None, k: int, asked_k: int | None) -> list[str] | None:
    if compare is None and asked_k is None:
        return None
    named = [name for name in compare or [] if name != DEFAULT]
    return named or ["mdp", f"fixed:{k}"]


def _run(asked: EvalConfig, *, as_json: bool, fresh: bool, dry_run: bool) -> int:
    from trainwright.errors import ExitCode
    from trainwright.evaluate.eval_run import evaluate

    finished = evaluate(asked, fresh=fresh, dry_run=dry_run)
    if isinstance(finished, ExitCode):
        return finished
    if as_json:
        typer.echo(json.dumps(finished.summary(), indent=2))
    else:
        for line in finished.lines():
            typer.echo(line)
    return ExitCode.DONE


def _run_quick(asked: EvalConfig, *, as_json: bool, dry_run: bool) -> int:
    from trainwright.errors import ExitCode
    from trainwright.evaluate.eval_run import evaluate
    from trainwright.evaluate.quick import quick_tests

    summaries = []
    for number, test in enumerate(quick_tests(asked), 1):
        typer.echo(f"Test {number} of 3: {test.title}", err=True)
        finished = evaluate(test.asked, fresh=not dry_run, dry_run=dry_run, show_data=number == 1)
        if isinstance(finished, ExitCode):
            return finished
        summaries.append({"test": test.title, **finished.summary()})
        if not as_json:
            typer.echo(f"Test {number} of 3, {test.title}: {'not run' if dry_run else 'ran to its end'}")
            for line in finished.lines():
                typer.echo(line)
    if as_json:
        typer.echo(json.dumps({"schema_version": 1, "tests": summaries}, indent=2))
    return ExitCode.DONE

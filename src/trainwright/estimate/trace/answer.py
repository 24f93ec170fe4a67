"""Entry: `python -m trainwright.estimate.trace.answer REQUEST.json`; the figures go to stdout as JSON.

REQUEST.json holds one request, or a list of them, which gives a list and imports the libraries once; in a list a
request that cannot be traced gives `{"error": ...}` in its place. An object with a `script`
(estimate/script_request.py) runs a user's own training script; what that prints goes to stderr. With `-` in place of a
file each line of stdin is a question, `{"request": ...}` or `{"shapes": {"config": ..., "auto_class": ...}}`, and is
answered by a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from trainwright.errors import ExitCode, UserError
from trainwright.estimate.request import Request
from trainwright.estimate.script_request import ScriptRequest
from trainwright.framework_imports import collector_at_rest


def main(arguments: list[str]) -> int:
    """Trace what the file asks for; of a single request a UserError is the exit code too."""
    if len(arguments) != 1:
        print("usage: python -m trainwright.estimate.trace.answer REQUEST.json", file=sys.stderr)
        return ExitCode.USAGE
    if arguments[0] == "-":
        return _answer_lines()
    data = json.loads(Path(arguments[0]).read_text())
    exit_code = ExitCode.DONE
    try:
        if isinstance(data, list):
            answer: Any = _answers(data)
        elif "script" in data:
            answer = _answer_of_script(ScriptRequest.parse(data))
        else:
            answer = _answer(Request.parse(data))
    except UserError as error:
        print(error.render(), file=sys.stderr)
        answer, exit_code = _as_data(error), error.exit_code
    json.dump(answer, sys.stdout)
    print()
    return exit_code


def _answer_lines() -> int:
    with _prints_to_stderr() as figures:
        for line in sys.stdin:
            figures.write(json.dumps(_answer_to(json.loads(line))) + "\n")
            figures.flush()
    return ExitCode.DONE


def _answer_to(question: dict[str, Any]) -> dict[str, Any]:
    try:
        if "shapes" in question:
            from trainwright.estimate.trace.shapes_on_meta import shapes

            _without_network()
            return shapes(**question["shapes"])
        return _answer(Request.parse(question["request"]))
    except UserError as error:
        return _as_data(error)
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises
        return {"broken": _in_a_line(error)}


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def _answers(data: Sequence[Any]) -> list[dict[str, Any]]:
    asked = [_parse(item) for item in data]
    _import_libraries([request for request in asked if isinstance(request, Request)])
    return [_as_data(request) if isinstance(request, UserError) else _answer_or_error(request) for request in asked]


def _parse(data: Any) -> Request | UserError:
    try:
        return Request.parse(data)
    except UserError as error:
        return error


def _answer_or_error(request: Request) -> dict[str, Any]:
    try:
        return _traced(request)
    except UserError as error:
        return _as_data(error)
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises: the others are answered all the same
        return {"error": _in_a_line(error), "problems": [], "hints": []}


def _as_data(error: UserError) -> dict[str, Any]:
    return {"error": error.message, "problems": error.problems, "hints": error.hints}


def _answer(request: Request) -> dict[str, Any]:
    _import_libraries([request])
    return _traced(request)


def _answer_of_script(request: ScriptRequest) -> dict[str, Any]:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a compiled graph cannot be traced: it runs as written
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # fake tensors are made in one thread
    os.environ["WANDB_MODE"] = "disabled"
    warnings.filterwarnings("ignore")
    with collector_at_rest():
        from trainwright.estimate.trace.versions import require_internals, versions

        require_internals()
        from trainwright.estimate.trace.peaks_report import report
        from trainwright.estimate.trace.script import trace_script

    began_s = time.perf_counter()
    with _prints_to_stderr():
        run = trace_script(request)
    print(f"traced in {time.perf_counter() - began_s:.2f} s", file=sys.stderr)
    return report(request, run, versions())


@contextmanager
def _prints_to_stderr() -> Iterator[TextIO]:
    """Yield what stdout was, which is for the figures: what a script prints, or a process of its, goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as figures:
        os.dup2(2, 1)
        try:
            yield figures
        finally:
            sys.stdout.flush()
            os.dup2(figures.fileno(), 1)


def _traced(request: Request) -> dict[str, Any]:
    from trainwright.estimate.trace.depths import two_depths
    from trainwright.estimate.trace.peaks_report import report
    from trainwright.estimate.trace.run import trace
    from trainwright.estimate.trace.versions import versions

    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    answer = two_depths(request, versions()) if request.two_depths else report(request, trace(request), versions())
    cpu_s = time.process_time() - began_cpu_s
    print(f"traced in {time.perf_counter() - began_s:.2f} s, {cpu_s:.2f} s of processor time", file=sys.stderr)
    return answer


def _without_network() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")


def _import_libraries(requests: Sequence[Request]) -> None:
    """Import torch and the rest, timed."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    _without_network()
    if all(request.method.type != "qlora" for request in requests):
        # peft imports it where it is there, and it takes as long as torch; None says that it is not.
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    with collector_at_rest():
        from trainwright.estimate.trace.versions import require_internals

        require_internals()
        from trainwright.estimate.trace.run import prepare

        prepare(with_adapters=any(request.method.type != "full" for request in requests))
    cpu_s = time.process_time() - began_cpu_s
    print(f"imports {time.perf_counter() - began_s:.2f} s, {cpu_s:.2f} s of processor time", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

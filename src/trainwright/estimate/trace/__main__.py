"""Entry: `python -m trainwright.estimate.trace REQUEST.json`; the figures go to stdout as JSON.

REQUEST.json holds one request, or a list of them, which gives a list and imports the libraries once; in a list a
request that cannot be traced gives `{"error": ...}` in its place.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError


def main(arguments: list[str]) -> int:
    """Trace what the file asks for; of a single request a UserError is the exit code too."""
    if len(arguments) != 1:
        print("usage: python -m trainwright.estimate.trace REQUEST.json", file=sys.stderr)
        return ExitCode.USAGE
    data = json.loads(Path(arguments[0]).read_text())
    exit_code = ExitCode.DONE
    try:
        answer = [_answer_or_error(item) for item in data] if isinstance(data, list) else _answer(data)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        answer, exit_code = _as_data(error), error.exit_code
    json.dump(answer, sys.stdout)
    print()
    return exit_code


def _answer_or_error(data: Any) -> dict[str, Any]:
    try:
        return _answer(data)
    except UserError as error:
        return _as_data(error)


def _as_data(error: UserError) -> dict[str, Any]:
    return {"error": error.message, "problems": error.problems, "hints": error.hints}


def _answer(data: Any) -> dict[str, Any]:
    from trainwright.estimate.trace.request import Request

    request = Request.parse(data)
    versions = _import_libraries(with_adapters=request.method.type != "full")
    from trainwright.estimate.trace.depths import two_depths
    from trainwright.estimate.trace.report import report
    from trainwright.estimate.trace.run import trace

    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    answer = two_depths(request, versions) if request.two_depths else report(request, trace(request), versions)
    cpu_s = time.process_time() - began_cpu_s
    print(f"traced in {time.perf_counter() - began_s:.2f} s, {cpu_s:.2f} s of processor time", file=sys.stderr)
    return answer


@functools.cache
def _import_libraries(*, with_adapters: bool) -> dict[str, str]:
    """Import torch and the rest, timed; return their versions."""
    began_s = time.perf_counter()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    from trainwright.estimate.trace.versions import require_internals, versions

    require_internals()
    from trainwright.estimate.trace.run import prepare

    prepare(with_adapters=with_adapters)
    print(f"imports {time.perf_counter() - began_s:.2f} s", file=sys.stderr)
    return versions()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

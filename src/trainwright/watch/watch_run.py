"""`trainwright watch`: which reader, and which of the views."""

from __future__ import annotations

import json
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from trainwright.errors import not_installed
from trainwright.watch.alerts.active_alerts import alert_line
from trainwright.watch.plain import brief, whole
from trainwright.watch.run_lookup import find_run
from trainwright.watch.run_reader import RunReader
from trainwright.watch.view import Reader

Form = Literal["live", "once", "json", "web"]

LINE_S = 10.0
"""How often a pipe gets a line."""


def show(run: str | None, output_dir: Path, form: Form, *, port: int = 0) -> None:
    """Show a run, or this machine if it is None, until it has ended or the user has.

    Raises:
        UserError: there is no such run, or what the view needs is not installed.
    """
    with ExitStack() as held:
        reader = _reader(run, output_dir, held, once=form in ("json", "once"))
        if form == "json":
            print(json.dumps(reader.read().to_json(), indent=2, ensure_ascii=False))
        elif form == "once":
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            print("\n".join(whole(reader.read(), width)))
        elif form == "web":
            _serve(reader, port)
        elif sys.stdout.isatty():
            _open_terminal(reader)
        else:
            _print_lines(reader)


def _reader(run: str | None, output_dir: Path, held: ExitStack, *, once: bool) -> Reader:
    if run is not None:
        return RunReader(find_run(run, output_dir))
    # Imported here: a run is read without NVML, and so without what it costs to load it.
    from trainwright.watch.gpus import GpuReader
    from trainwright.watch.machine_reader import MachineReader

    return MachineReader(held.enter_context(GpuReader()), once=once)


def _serve(reader: Reader, port: int) -> None:
    try:
        from trainwright.watch.web.serving import serve
    except ModuleNotFoundError as error:
        raise not_installed("the page", str(error.name), extra="web", instead="watch in the terminal") from error
    serve(reader, port)


def _open_terminal(reader: Reader) -> None:
    try:
        from trainwright.watch.terminal import WatchApp
    except ModuleNotFoundError as error:
        instead = "print how things stand: --once"
        raise not_installed("the terminal view", str(error.name), extra="tui", instead=instead) from error
    WatchApp(reader).run()


def _print_lines(reader: Reader) -> None:
    """Print everything once, then a line now and again and each alert, until the run has ended."""
    view = reader.read()
    print("\n".join(whole(view)), flush=True)
    printed = {alert.key: alert for alert in view.alerts}
    try:
        while view.run is None or view.run.state in ("preparing", "running"):
            time.sleep(LINE_S)
            view = reader.read()
            now = {alert.key: alert for alert in view.alerts}
            for key in now.keys() - printed.keys():
                print(alert_line(now[key]), flush=True)
            printed = now
            print(brief(view), flush=True)
    except KeyboardInterrupt:
        return

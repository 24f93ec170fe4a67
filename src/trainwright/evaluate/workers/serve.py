"""Entry of one worker: `python -m trainwright.evaluate.workers.serve FD`."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import traceback
import warnings
from types import TracebackType

from trainwright.errors import ExitCode, UserError
from trainwright.evaluate.worker_protocol import Wire
from trainwright.runs.kill_domain import die_with_launcher


def main() -> int:
    """Answer what the command sends until it sends no more; what ends this worker otherwise is sent back."""
    die_with_launcher()
    os.umask(0o077)
    faulthandler.enable()
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Say what happened and leave at once: an engine's threads and processes could hold the interpreter."""
        text = "".join(traceback.format_exception(kind, error, trace))
        if not isinstance(error, UserError):
            error = UserError(text.rstrip().splitlines()[-1], exit_code=ExitCode.FAILED)
        print(text, file=sys.stderr, flush=True)
        wire.send({"failed": error.to_json()})
        os._exit(error.exit_code)

    sys.excepthook = end
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|transformers")
    from trainwright.evaluate.workers.working import work

    work(wire)
    return 0


if __name__ == "__main__":
    sys.exit(main())
